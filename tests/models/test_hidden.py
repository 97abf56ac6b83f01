"""Hidden states that are kept: of settled rows only, and under their own positions."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.models.decoder import Decoder, Segment
from cluster.models.hidden import HiddenRows, HiddenWanted, SettledRows, Taps
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.worker import TargetWorker
from tests.checkpoints import make_checkpoint

GREEDY = SamplingSpec(seed=0, temperature=0.0)
CPU = torch.device("cpu")


def numbered(*positions: int) -> torch.Tensor:
    """Rows of one element, which is their number."""
    return torch.tensor(positions, dtype=torch.float32)[:, None]


def make_rows(*, num_sequences: int = 2, num_rows: int = 8) -> HiddenRows:
    wanted = HiddenWanted(num_sequences=num_sequences, num_rows=num_rows)
    return HiddenRows(wanted, hidden_size=1, dtype=torch.float32, device=CPU)


def keep(rows: HiddenRows, seq_id: int, start: int, token_ids: list[int], marks: list[int]) -> None:
    rows.keep([SettledRows(seq_id, start, token_ids, 0)], numbered(*marks), None)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(1, 6)), max_size=30),
    st.integers(1, 9),
)
def test_what_is_read_is_what_was_last_kept_of_these_tokens(
    steps: list[tuple[int, int, int]], num_rows: int
) -> None:
    """Sequences that go back and on, in too few places: a row is the latest one or not there."""
    rows = make_rows(num_rows=num_rows)
    texts: dict[int, list[int]] = {}
    marks: dict[int, list[int]] = {}
    rng = random.Random(0)
    for number, (seq_id, back, length) in enumerate(steps):
        text = texts.setdefault(seq_id, [])
        start = max(len(text) - back, 0)
        added = [rng.randrange(3) for _ in range(length)]
        own = [1000 * number + row for row in range(length)]
        keep(rows, seq_id, start, added, own)
        texts[seq_id] = text[:start] + added
        marks[seq_id] = marks.get(seq_id, [])[:start] + own
        for other, its in texts.items():
            first = rows.first(other, [*its, 9])
            if other == seq_id:
                assert first is not None
                assert first <= max(start, len(its) - num_rows)
            if first is not None:
                read = rows.rows(other, first, len(its)).flatten().tolist()
                assert read == marks[other][first:]


def test_other_tokens_under_the_same_id_are_not_believed() -> None:
    """Another sequence's states, or those of fewer tokens than there are: nothing."""
    rows = make_rows()
    keep(rows, 1, 0, [5, 6, 7], [0, 1, 2])
    assert rows.first(1, [5, 6, 7, 8]) == 0
    assert rows.first(1, [5, 6]) == 0
    assert rows.first(1, [5, 9, 7, 8]) is None
    assert rows.first(1, [5, 6, 7, 8, 9]) is None
    assert rows.first(1, [5]) is None
    assert rows.first(2, [5, 6, 7, 8]) is None
    rows.forget(1)
    assert rows.first(1, [5, 6, 7, 8]) is None


def test_a_gap_begins_anew() -> None:
    """Positions that were skipped (a prefix from the cache): what was before does not count."""
    rows = make_rows()
    keep(rows, 1, 0, [5, 6], [0, 1])
    keep(rows, 1, 4, [7, 8], [4, 5])
    text = [5, 6, 1, 2, 7, 8, 3]
    assert rows.first(1, text) == 4
    assert rows.rows(1, 4, 6).flatten().tolist() == [4.0, 5.0]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Decoder:
    del one_thread
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), num_layers=4, hidden_size=32)
    return load_decoder(folder, dtype="float32")


@pytest.mark.parametrize("layers", [(), (0, 2, 4)])
@torch.inference_mode()
def test_a_worker_keeps_the_states_of_one_plain_pass(
    decoder: Decoder, layers: tuple[int, ...]
) -> None:
    """Two sequences by chunks, with drafts that are right, half right and wrong: equal bits."""
    worker = TargetWorker(decoder, num_blocks=4, block_size=128)
    kept = worker.keep_hidden(HiddenWanted(num_sequences=2, num_rows=100, layers=layers))
    rng = random.Random(3)
    texts = {
        seq_id: [rng.randrange(512) for _ in range(length)] for seq_id, length in ((1, 40), (2, 7))
    }
    computed = {1: 0, 2: 0}
    for step in range(12):
        parts = []
        for seq_id, text in texts.items():
            rows = text[computed[seq_id] :][:16]
            ends = computed[seq_id] + len(rows) == len(text)
            drafts = _continued(decoder, text, 3)[: rng.randrange(4)] if ends else []
            if drafts and step % 3:
                drafts[-1] = (drafts[-1] + 1) % 512
            parts.append(
                SequenceRows(
                    seq_id=seq_id,
                    block_table=(seq_id,),
                    start=computed[seq_id],
                    token_ids=(*rows, *drafts),
                    num_drafts=len(drafts),
                    sampling=GREEDY if ends else None,
                )
            )
        answers = {a.seq_id: a for a in worker.step(StepInput(step, tuple(parts))).sequences}
        for part in parts:
            answer = answers.get(part.seq_id)
            computed[part.seq_id] += len(part.token_ids) - part.num_drafts
            if answer is not None and answer.num_accepted < part.num_drafts:
                rejected = [*texts[part.seq_id][: part.start], *part.token_ids]
                assert kept.first(part.seq_id, [*rejected, 0]) is None
            if answer is not None:
                computed[part.seq_id] += answer.num_accepted
                texts[part.seq_id] += answer.token_ids
        for seq_id, text in texts.items():
            settled = text[: computed[seq_id]]
            assert kept.first(seq_id, [*settled, 0]) == 0
            assert torch.equal(
                kept.rows(seq_id, 0, len(settled)), _states(decoder, settled, layers)
            )


def _states(decoder: Decoder, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """The states of one pass over all tokens."""
    taps = Taps(layers)
    cache = KVCache.of(decoder, num_blocks=1, block_size=128)
    segment = Segment((0,), 0, len(token_ids))
    hidden = decoder.forward(torch.tensor(token_ids), [segment], cache, taps)
    return torch.cat(taps.of(layers), dim=-1) if layers else hidden


def _continued(decoder: Decoder, token_ids: list[int], number: int) -> list[int]:
    """What the decoder says next."""
    text = list(token_ids)
    for _ in range(number):
        text.append(int(decoder.logits(_states(decoder, text, ())[-1:]).argmax()))
    return text[len(token_ids) :]


@pytest.mark.parametrize("layers", [(0, 2, 4), (4,), (1, 3), (2, 2)])
def test_layers_in_one_call_are_tapped_as_layers_one_by_one(
    tmp_path: Path, layers: tuple[int, ...]
) -> None:
    whole = load_decoder(make_checkpoint(tmp_path, num_layers=4), dtype="float32")
    found = []
    for decoder in (whole, whole.without()):  # which goes layer by layer
        states = _states(decoder, [3, 1, 4, 1, 5, 9], layers)
        found.append((states, _states(decoder, [3, 1, 4, 1, 5, 9], ())))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
