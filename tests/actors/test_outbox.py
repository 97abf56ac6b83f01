"""What waits for a gateway."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cluster.actors.outbox import MAX_WAITING, Outbox
from cluster.messages import TokenDelta
from cluster.request import FinishReason


def delta(
    request_id: str, *token_ids: int, finish_reason: FinishReason | None = None
) -> TokenDelta:
    return TokenDelta(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=tuple(-float(token_id) for token_id in token_ids),
        top_logprobs=tuple(((token_id, -1.0),) for token_id in token_ids),
        prompt_logprobs=tuple(float(token_id) for token_id in token_ids),
        num_cached_tokens=len(token_ids),
        num_drafted=len(token_ids),
        num_accepted=len(token_ids) // 2,
        finish_reason=finish_reason,
    )


PUTS = st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=4))
ACTIONS = st.lists(st.one_of(PUTS, PUTS, PUTS, st.none()), max_size=40)  # None is a take


@given(ACTIONS)
def test_however_slow_the_gateway_every_token_arrives_once_and_in_order(
    actions: list[tuple[str, list[int]] | None],
) -> None:
    """Joining deltas loses, doubles and reorders nothing, and sums their counts."""

    async def run() -> list[TokenDelta]:
        outbox = Outbox(max_waiting=1)
        taken: list[TokenDelta] = []
        for action in [*actions, None]:
            if action is None:
                taken += await outbox.take(patience_seconds=0)
            else:
                outbox.put(delta(action[0], *action[1]))
        return taken

    taken = asyncio.run(run())
    for request_id in "ab":
        put = [delta(name, *ids) for name, ids in filter(None, actions) if name == request_id]
        got = [item for item in taken if item.request_id == request_id]
        for field in ("token_ids", "logprobs", "top_logprobs", "prompt_logprobs"):
            assert sum((getattr(item, field) for item in got), ()) == sum(
                (getattr(item, field) for item in put), ()
            )
        assert sum(item.num_steps for item in got if item.token_ids) == sum(
            1 for item in put if item.token_ids
        )
        for field in ("num_drafted", "num_accepted", "num_cached_tokens"):
            assert sum(getattr(item, field) for item in got) == sum(
                getattr(item, field) for item in put
            )


async def test_waiting_is_bounded_by_the_requests() -> None:
    """A thousand steps nobody fetched wait as a few deltas a request, the end included."""
    outbox = Outbox()
    for token_id in range(1000):
        outbox.put(delta("a", token_id))
        outbox.put(delta("b", token_id))
    outbox.put(delta("b", finish_reason=FinishReason.LENGTH))
    taken = await outbox.take(patience_seconds=0)
    assert len(taken) == 2 * MAX_WAITING
    for request_id, end in (("a", None), ("b", FinishReason.LENGTH)):
        deltas = [item for item in taken if item.request_id == request_id]
        assert [i for item in deltas for i in item.token_ids] == list(range(1000))
        assert [item.finish_reason for item in deltas] == [None] * (MAX_WAITING - 1) + [end]


async def test_a_gateway_that_keeps_pace_gets_every_step_by_itself() -> None:
    """A few steps behind is no reason to join: what a step brought stays one delta."""
    outbox = Outbox()
    for token_id in range(MAX_WAITING):
        outbox.put(delta("a", token_id))
    taken = await outbox.take(patience_seconds=0)
    assert [item.token_ids for item in taken] == [(i,) for i in range(MAX_WAITING)]


async def test_nothing_to_tell_is_told_after_the_patience() -> None:
    """An empty take is what makes a heartbeat."""
    assert await Outbox().take(patience_seconds=0.001) == ()


async def test_a_take_is_woken_by_the_first_delta() -> None:
    """A waiting gateway is not kept until the heartbeat."""
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take(patience_seconds=60))
    await asyncio.sleep(0)
    outbox.put(delta("a", 1))
    assert [item.token_ids for item in await taking] == [(1,)]


async def test_silence_is_counted_from_the_last_take() -> None:
    """A gateway that comes for nothing is not silent; one that does not come is."""
    now = 100.0
    outbox = Outbox(clock=lambda: now)
    now = 107.0
    assert outbox.silent_seconds == 7.0
    await outbox.take(patience_seconds=0)
    assert outbox.silent_seconds == 0.0
