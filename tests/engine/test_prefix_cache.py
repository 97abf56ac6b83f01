"""Which tokens are at hand for whom: shared full blocks, copied or adopted tails, eviction."""

import pytest

from cluster.engine.blocks import BlockManager, Prefix
from cluster.engine.prefix_cache import MIN_COPIED_TOKENS, common_length
from cluster.errors import OutOfBlocks
from cluster.messages import BlockCopy

BLOCK = 16
TEXT = list(range(100, 200))


def run(
    blocks: BlockManager,
    seq_id: int,
    token_ids: list[int],
    *,
    salt: str = "",
    settled: int | None = None,
) -> Prefix:
    """Admit a sequence and settle all its tokens, or so many."""
    prefix = blocks.admit(seq_id, token_ids, salt=salt, limit=len(token_ids) - 1)
    blocks.settle(seq_id, token_ids, len(token_ids) if settled is None else settled)
    return prefix


def test_full_blocks_are_shared_and_the_rest_of_the_prefix_is_copied() -> None:
    """Two whole blocks are the first sequence's own; eight more tokens come by a copy."""
    blocks = BlockManager(8, BLOCK)
    run(blocks, 1, TEXT[:45])
    prefix = blocks.admit(2, [*TEXT[:40], 1, 2, 3], salt="", limit=42)
    first, second = blocks.table(1), blocks.table(2)
    assert second[:2] == first[:2]
    assert prefix == Prefix(40, (BlockCopy(first[2], second[2], 8),))
    assert blocks.num_free == 8 - 4


def test_a_few_tokens_are_not_worth_a_copy() -> None:
    """Below MIN_COPIED_TOKENS they are computed."""
    blocks = BlockManager(4, 64)
    run(blocks, 1, TEXT[:30])
    few = [*TEXT[: MIN_COPIED_TOKENS - 1], 1, 2]
    assert run(blocks, 2, few) == Prefix()
    enough = [*TEXT[:MIN_COPIED_TOKENS], 1, 2]
    assert run(blocks, 3, enough).num_tokens == MIN_COPIED_TOKENS


def test_the_last_token_is_always_computed() -> None:
    """The same prompt twice: all but one token at hand, and a whole block is not shared for it."""
    blocks = BlockManager(8, BLOCK)
    run(blocks, 1, TEXT[:32])
    blocks.free(1)
    prefix = run(blocks, 2, TEXT[:32])
    assert prefix.num_tokens == 31
    [copy] = prefix.copies
    assert copy.num_tokens == 15


def test_an_idle_entry_that_is_a_whole_prefix_is_taken_over() -> None:
    """The next turn of a chat goes on in the block of the one before: no copy, no second block."""
    blocks = BlockManager(4, 100)
    run(blocks, 1, TEXT[:50])
    table = blocks.table(1)
    blocks.free(1)
    assert run(blocks, 2, TEXT[:60]) == Prefix(50)
    assert blocks.table(2) == table
    assert blocks.num_free == 3


def test_an_entry_that_others_may_want_whole_is_copied() -> None:
    """Another end after a common start: the entry stays as it was."""
    blocks = BlockManager(4, 100)
    run(blocks, 1, TEXT[:50])
    [source] = blocks.table(1)
    blocks.free(1)
    prefix = run(blocks, 2, [*TEXT[:40], 1])
    assert prefix == Prefix(40, (BlockCopy(source, blocks.table(2)[0], 40),))
    assert run(blocks, 3, TEXT[:60]) == Prefix(50)


def test_the_last_block_of_all_is_adopted_for_the_common_start() -> None:
    """With no other block to be had, an entry's own block goes on with other tokens."""
    blocks = BlockManager(1, 100)
    run(blocks, 1, TEXT[:50])
    blocks.free(1)
    assert run(blocks, 2, [*TEXT[:40], 1]) == Prefix(40)
    blocks.free(2)
    assert blocks.admit(3, TEXT[:50], salt="", limit=49) == Prefix(40)


def test_a_running_sequence_lends_its_settled_tokens_only() -> None:
    """A draft position under verification, or a prompt not yet computed, is nobody's business."""
    blocks = BlockManager(4, 100)
    run(blocks, 1, TEXT[:50], settled=20)
    assert blocks.admit(2, TEXT[:50], salt="", limit=49).num_tokens == 20
    assert blocks.table(2) != blocks.table(1)


def test_salts_keep_tenants_apart() -> None:
    """The same tokens under another salt are not found, and leave no trace when evicted."""
    blocks = BlockManager(2, 100)
    run(blocks, 1, TEXT[:50], salt="a")
    blocks.free(1)
    assert run(blocks, 2, TEXT[:50], salt="b") == Prefix()
    blocks.free(2)
    assert run(blocks, 3, TEXT[:51], salt="a") == Prefix(50)


def test_a_block_is_found_by_all_tokens_before_it() -> None:
    """Equal tokens in a block do not make a prefix: those before them have to be equal, too."""
    blocks = BlockManager(8, BLOCK)
    run(blocks, 1, TEXT[:48])
    assert run(blocks, 2, TEXT[16:48]) == Prefix()


def test_the_entry_unused_for_longest_goes_first() -> None:
    """What was used last stays; a use makes an entry young again."""
    blocks = BlockManager(3, 100)
    texts = [[index, *TEXT[:20]] for index in range(4)]
    for index in range(3):
        run(blocks, index, texts[index])
        blocks.free(index)
    run(blocks, 10, [*texts[0], 7])
    blocks.free(10)
    assert run(blocks, 11, texts[3]) == Prefix()  # at the cost of texts[1]
    blocks.free(11)
    assert run(blocks, 12, [*texts[0], 7, 8]).num_tokens == 22
    assert run(blocks, 13, [*texts[2], 7]).num_tokens == 21
    assert run(blocks, 14, [*texts[1], 7]).num_tokens == 0


def test_what_is_being_copied_is_not_what_makes_room() -> None:
    """The common start is in the older of two entries: the other one goes, and the start stays."""
    blocks = BlockManager(2, 100)
    for seq_id, text in ((1, TEXT[:50]), (2, [1, *TEXT])):
        run(blocks, seq_id, text[:60])
        blocks.free(seq_id)
    assert len(run(blocks, 3, [*TEXT[:40], 1]).copies) == 1
    blocks.free(3)
    assert run(blocks, 4, TEXT[:60]) == Prefix(50)


def test_the_end_of_a_chain_is_evicted_before_its_start() -> None:
    """A prefix without its first block would be of no use."""
    blocks = BlockManager(4, BLOCK)
    run(blocks, 1, TEXT[:64])
    blocks.free(1)
    run(blocks, 2, [1] * BLOCK)
    blocks.free(2)
    assert blocks.admit(3, TEXT[:64], salt="", limit=63).num_tokens == 63 - 15


def test_what_two_computed_at_the_same_time_is_kept_once() -> None:
    """The second one to fill a block of equal tokens goes on with the first one's."""
    blocks = BlockManager(8, BLOCK)
    for seq_id in (1, 2):
        blocks.admit(seq_id, TEXT[:40], salt="", limit=0)
    assert not set(blocks.table(1)) & set(blocks.table(2))
    for seq_id in (1, 2):
        blocks.settle(seq_id, TEXT[:40], 40)
    assert blocks.table(1)[:2] == blocks.table(2)[:2]
    assert blocks.num_free == 8 - 4
    blocks.free(1)
    assert blocks.num_free == 8 - 3
    blocks.free(2)
    assert blocks.num_free == 8


def test_an_entry_that_another_begins_with_is_not_kept() -> None:
    """Ten times the same prompt leaves one entry, and every other block empty."""
    blocks = BlockManager(3, 100)
    other = [1, *TEXT[:50]]
    run(blocks, 1, other)
    blocks.free(1)
    for seq_id in range(2, 12):
        run(blocks, seq_id, TEXT[: 40 + seq_id % 3])
        blocks.free(seq_id)
    assert run(blocks, 20, [*other, 2]).num_tokens == 51


def test_without_reuse_nothing_is_found() -> None:
    """The cache can be off."""
    blocks = BlockManager(4, BLOCK, reuse=False)
    run(blocks, 1, TEXT[:40])
    assert run(blocks, 2, TEXT[:16]) == Prefix()
    blocks.free(1)
    assert run(blocks, 3, TEXT[:40]) == Prefix()


def test_a_cached_block_is_free_and_a_shared_one_is_not_needed_twice() -> None:
    """Room is what nobody uses; what the newcomer would share it need not find."""
    blocks = BlockManager(4, BLOCK)
    run(blocks, 1, TEXT[:48])
    assert blocks.fits(TEXT[:64], salt="", limit=63)
    assert not blocks.fits(TEXT[:64], salt="other", limit=63)
    with pytest.raises(OutOfBlocks) as caught:
        blocks.admit(2, TEXT[:64], salt="other", limit=63)
    assert (caught.value.needed, caught.value.free) == (4, 1)
    assert blocks.table(2) == ()
    assert blocks.fits(TEXT[:64], salt="other", limit=63, without=[1])
    blocks.free(1)
    assert blocks.num_free == 4
    blocks.admit(2, TEXT[:64], salt="other", limit=63)
    assert blocks.num_free == 0


def test_common_length_is_the_first_difference() -> None:
    """At every place, and at none."""
    for length in range(20):
        other = TEXT[:length] + [0] * 5
        assert common_length(TEXT[:25], other) == length
    assert common_length(TEXT, TEXT[:7]) == 7
    assert common_length([], TEXT) == 0
