"""A draft model in the engine's process: deadlines, lateness, ends and closing."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from cluster.drafters.contexts import DraftContexts
from cluster.drafters.model import ModelDrafter
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Resync, SamplingSpec

GREEDY = SamplingSpec(seed=0, temperature=0.0)


class SlowModel:
    """Drafts the length of the context, and does so only while it is let."""

    context_limit = 64

    def __init__(self) -> None:
        self.contexts = DraftContexts(4)
        self.messages: list[ExchangeInput] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.failing = False
        self.failing_ahead = False
        self.num_advances = 0
        self.num_advances_at_message: list[int] = []
        self.most_advances = 3

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """Until the block ends no draft is finished."""
        self.may_go_on.clear()
        try:
            yield
        finally:
            self.may_go_on.set()

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Follow the contexts; takes as long as it is stuck."""
        self.messages.append(message)
        self.num_advances_at_message.append(self.num_advances)
        drafts: dict[int, Draft | Resync] = {
            seq_id: Resync() if context is None else Draft((len(context.token_ids),))
            for seq_id, context in self.contexts.receive(message).items()
        }
        assert self.may_go_on.wait(timeout=120)
        if self.failing:
            message_text = "the device is on fire"
            raise RuntimeError(message_text)
        return ExchangeOutput(message.step_id, drafts)

    def advance(self) -> bool:
        """Count, as far as there is something to do."""
        self.num_advances += 1
        assert self.may_go_on.wait(timeout=120)
        if self.failing_ahead:
            message_text = "the device is on fire"
            raise RuntimeError(message_text)
        return self.num_advances < self.most_advances


@asynccontextmanager
async def drafting(*, run_ahead: bool = False) -> AsyncIterator[tuple[SlowModel, ModelDrafter]]:
    model = SlowModel()
    drafter = ModelDrafter(model, name="slow", run_ahead=run_ahead)
    try:
        yield model, drafter
    finally:
        drafter.close()


def query(seq_id: int, length: int) -> DraftQuery:
    return DraftQuery(seq_id=seq_id, token_ids=[7] * length, num_wanted=1, sampling=GREEDY)


async def idle(drafter: ModelDrafter) -> None:
    """Wait until the thread has done all it was given."""
    if drafter._running is not None:
        await asyncio.wait([drafter._running])
    await asyncio.wrap_future(drafter._thread.submit(lambda: None))


async def test_drafts_come_back_by_sequence() -> None:
    """Each sequence is followed by deltas and gets the draft of its own context."""
    async with drafting() as (model, drafter):
        assert drafter.name == "slow"
        assert drafter.context_limit == 64
        assert await drafter.propose([query(1, 3), query(2, 5)]) == {1: Draft((3,)), 2: Draft((5,))}
        assert await drafter.propose([query(1, 4)]) == {1: Draft((4,))}
        assert model.messages[-1].wanted[0].new_token_ids == (7,)


async def test_a_late_call_is_busy_and_its_answer_still_counts() -> None:
    """After a missed deadline the next call fails at once; later ones go on from the late state."""
    async with drafting() as (model, drafter):
        with model.stuck():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await drafter.propose([query(1, 3)])
            with pytest.raises(DrafterUnavailable) as unavailable:
                await drafter.propose([query(1, 4)])
            assert unavailable.value.reason == "busy"
        await idle(drafter)
        assert await drafter.propose([query(1, 5)]) == {1: Draft((5,))}
        assert [part.base_length for part in model.messages[-1].wanted] == [3]
        assert len(model.messages) == 2


async def test_ends_reach_an_idle_model_at_once() -> None:
    """When the last sequence ends nothing stays in the model, though no draft is asked any more."""
    async with drafting() as (model, drafter):
        await drafter.propose([query(1, 3), query(2, 3)])
        drafter.release([1, 2, 99])
        await idle(drafter)
        assert len(model.contexts) == 0


async def test_ends_during_a_late_call_reach_the_model_after_it() -> None:
    """A sequence aborted while it is drafted for is dropped when the model is free again."""
    async with drafting() as (model, drafter):
        with model.stuck():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await drafter.propose([query(1, 3)])
            drafter.release([1])
        await idle(drafter)
        assert len(model.contexts) == 0


async def test_a_failure_is_seen_and_the_next_call_tries_again() -> None:
    """The model's error is not swallowed, and one failure is not the end of drafting."""
    async with drafting() as (model, drafter):
        model.failing = True
        with pytest.raises(RuntimeError, match="on fire"):
            await drafter.propose([query(1, 3)])
        model.failing = False
        assert await drafter.propose([query(1, 4)]) == {1: Draft((4,))}


async def test_closed_it_is_unavailable_and_leaves_no_thread() -> None:
    """Closing ends the thread; calls after it cost nothing and fail nothing."""
    async with drafting() as (_, drafter):
        await drafter.propose([query(1, 3)])
        drafter.close()
        assert not any(thread.name.startswith("drafter") for thread in threading.enumerate())
        with pytest.raises(DrafterUnavailable):
            await drafter.propose([query(1, 4)])
        drafter.release([1])


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does; the test's own time-out is the end of it."""
    while not condition():  # noqa: ASYNC110 - another thread sets no event of this loop
        await asyncio.sleep(0.001)


async def test_between_exchanges_it_drafts_ahead_until_there_is_nothing_to_do() -> None:
    """An idle thread advances the model, and sleeps when the model has nothing left."""
    async with drafting(run_ahead=True) as (model, drafter):
        await idle(drafter)
        assert model.num_advances == 0  # nothing to follow yet
        await drafter.propose([query(1, 3)])
        await until(lambda: model.num_advances == 3)
        await idle(drafter)
        await idle(drafter)
        assert model.num_advances == 3
        model.most_advances = 5
        await drafter.propose([query(1, 4)])
        await until(lambda: model.num_advances == 5)


async def test_without_run_ahead_it_only_answers() -> None:
    """What is switched off takes no time from the target."""
    async with drafting() as (model, drafter):
        await drafter.propose([query(1, 3)])
        await idle(drafter)
        assert model.num_advances == 0


async def test_an_exchange_waits_for_one_forward_pass_at_most() -> None:
    """Whatever is left to draft ahead comes after what is asked for."""
    async with drafting(run_ahead=True) as (model, drafter):
        model.most_advances = 10**9
        await drafter.propose([query(1, 3)])
        await until(lambda: model.num_advances > 0)
        with model.stuck():
            before = model.num_advances
            asked = asyncio.create_task(drafter.propose([query(1, 4)]))
            await asyncio.sleep(0.01)
        await asyncio.wait([asked])
        assert asked.result() == {1: Draft((4,))}
        assert len(model.messages) == 2
        # One pass may have ended and another begun before the message was there; none came after.
        assert model.num_advances_at_message[-1] <= before + 1
        model.most_advances = 0


async def test_a_failure_while_drafting_ahead_is_raised_by_the_next_exchange() -> None:
    """Nothing is lost silently, and the thread goes on."""
    async with drafting(run_ahead=True) as (model, drafter):
        model.failing_ahead = True
        await drafter.propose([query(1, 3)])
        await idle(drafter)
        await idle(drafter)
        assert model.num_advances == 1
        model.failing_ahead = False
        with pytest.raises(RuntimeError, match="on fire"):
            await drafter.propose([query(1, 4)])
        assert await drafter.propose([query(1, 5)]) == {1: Draft((5,))}
