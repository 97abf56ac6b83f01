"""Drafts from workers that are late, dead, or several."""

import asyncio
from collections.abc import Sequence

import pytest

from cluster.actors.remote_drafter import TIDY_SECONDS, RemoteDrafter
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import (
    Draft,
    DraftDistribution,
    DraftWanted,
    ExchangeInput,
    ExchangeOutput,
    Resync,
    Rule,
    SamplingSpec,
)
from tests.actors.fake_ray import FakeDraftWorker, FakeHandle
from tests.virtual_time import run_virtually

HALVES = (0.5, 0.5)


class Counting(FakeDraftWorker):
    """A draft worker that holds contexts as the protocol wants, and counts on from the last token.

    It answers when `gate` is open, with distributions where the rule asks for them.
    """

    def __init__(self) -> None:
        self.contexts: dict[int, list[int]] = {}
        self.messages: list[ExchangeInput] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Drafts, or Resync for a base that is not there."""
        self.messages.append(message)
        for seq_id in message.finished:
            self.contexts.pop(seq_id, None)
        answer = ExchangeOutput(
            message.step_id,
            {part.seq_id: self._draft(part, message.rule) for part in message.wanted},
        )
        await self.gate.wait()
        return answer

    def _draft(self, part: DraftWanted, rule: Rule) -> Draft | Resync:
        context = self.contexts.setdefault(part.seq_id, [])
        if part.base_length > len(context):
            return Resync()
        context[part.base_length :] = part.new_token_ids
        token_ids = tuple(context[-1] + i + 1 for i in range(part.num_wanted))
        if rule is Rule.COUPLED:
            return Draft(token_ids)
        return Draft(token_ids, tuple(DraftDistribution((each, 0), HALVES) for each in token_ids))


def query(seq_id: int, token_ids: Sequence[int], num_wanted: int = 2) -> DraftQuery:
    return DraftQuery(
        seq_id=seq_id, token_ids=token_ids, num_wanted=num_wanted, sampling=SamplingSpec(seed=0)
    )


def drafter_with(*workers: Counting) -> tuple[RemoteDrafter, dict[str, FakeHandle]]:
    drafter = RemoteDrafter("draft", engine_id="engine", context_limit=100)
    handles = {f"worker-{place}": FakeHandle(worker) for place, worker in enumerate(workers)}
    drafter.set_workers(handles)
    return drafter, handles


async def reason(drafter: RemoteDrafter, *queries: DraftQuery) -> str:
    with pytest.raises(DrafterUnavailable) as caught:
        await drafter.propose(queries)
    return caught.value.reason


async def late(drafter: RemoteDrafter, *queries: DraftQuery) -> None:
    """Propose as an engine whose deadline passes."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await drafter.propose(queries)


async def test_one_exchange_a_worker_and_step_for_all_its_sequences() -> None:
    """However many sequences there are, a step costs one call to each worker."""
    workers = Counting(), Counting()
    drafter, _ = drafter_with(*workers)
    for step in range(3):
        drafts = await drafter.propose([query(i, range(step + 1)) for i in range(6)])
        assert drafts == {i: Draft((step + 1, step + 2)) for i in range(6)}
    for worker in workers:
        assert [len(message.wanted) for message in worker.messages] == [3, 3, 3]
        assert [part.base_length for part in worker.messages[2].wanted] == [2, 2, 2]


async def test_a_late_worker_is_busy_until_it_answers_and_then_up_to_date() -> None:
    """Nothing queues behind a late call, and its answer is not lost to the protocol."""
    worker = Counting()
    drafter, _ = drafter_with(worker)
    worker.gate.clear()
    await late(drafter, query(1, [5, 6]))
    assert await reason(drafter, query(1, [5, 6, 7])) == "busy"
    assert len(worker.messages) == 1
    worker.gate.set()
    await asyncio.sleep(0.01)
    assert await drafter.propose([query(1, [5, 6, 7, 8])]) == {1: Draft((9, 10))}
    assert worker.messages[1].wanted[0].base_length == 2
    assert worker.messages[1].wanted[0].new_token_ids == (7, 8)


async def test_without_workers_there_are_no_drafts() -> None:
    """A drafter whose workers are all gone costs an exception a step and nothing else."""
    drafter, _ = drafter_with()
    assert await reason(drafter, query(1, [1])) == "none"


async def test_a_dead_worker_is_dropped_until_another_comes() -> None:
    """Death is reported once; the name of the dead is not tried again; its successor is."""
    first = Counting()
    drafter, handles = drafter_with(first)
    assert await drafter.propose([query(1, [5])])
    handles["worker-0"].kill()
    assert await reason(drafter, query(1, [5, 6])) == "died"
    assert await reason(drafter, query(1, [5, 6])) == "none"
    drafter.set_workers(handles)  # the router has not noticed yet
    assert await reason(drafter, query(1, [5, 6])) == "none"
    successor = Counting()
    drafter.set_workers({"worker-9": FakeHandle(successor)})
    assert await drafter.propose([query(1, [5, 6])]) == {1: Draft((7, 8))}
    assert successor.messages[0].wanted[0].new_token_ids == (5, 6)


async def test_a_worker_that_dies_late_is_dropped_too() -> None:
    """A death nobody was waiting for any more is found at the next step."""
    worker = Counting()
    drafter, handles = drafter_with(worker)
    worker.gate.clear()
    await late(drafter, query(1, [5]))
    handles["worker-0"].kill()
    await asyncio.sleep(0.01)
    assert await reason(drafter, query(1, [5])) == "died"
    assert await reason(drafter, query(1, [5])) == "none"


async def test_one_dead_worker_of_two_costs_only_its_own_drafts() -> None:
    """The others' drafts are used, and its sequences move to them."""
    workers = Counting(), Counting()
    drafter, handles = drafter_with(*workers)
    queries = [query(i, [i]) for i in range(4)]
    await drafter.propose(queries)
    handles["worker-0"].kill()
    assert len(await drafter.propose(queries)) == 2
    assert len(await drafter.propose(queries)) == 4


def test_one_late_worker_of_two_costs_only_its_own_drafts() -> None:
    """The others' drafts are used in that very step, and from then on nobody waits for it."""

    async def steps() -> None:
        workers = Counting(), Counting()
        drafter, _ = drafter_with(*workers)
        queries = [query(i, [i]) for i in range(4)]
        await drafter.propose(queries)
        workers[0].gate.clear()
        async with asyncio.timeout(0.5):  # a fraction of what a first answer may take
            assert len(await drafter.propose(queries)) == 2
        begin = asyncio.get_running_loop().time()
        assert len(await drafter.propose(queries)) == 2
        assert asyncio.get_running_loop().time() == begin
        assert len(workers[0].messages) == 2

    run_virtually(steps())


def test_one_that_hung_is_given_sequences_again() -> None:
    """Beside one that never did it loses those it had; once it answers, new ones are its, too."""

    async def steps() -> None:
        workers = Counting(), Counting()
        drafter, _ = drafter_with(*workers)

        async def serve(first: int) -> int:
            """Sequences of ten steps each, two at once; in how many steps the first was asked."""
            before = len(workers[0].messages)
            for number in range(first, first + 20, 2):
                for length in range(10):
                    queries = [query(i, range(i, i + 1 + length)) for i in (number, number + 1)]
                    await drafter.propose(queries)
                    await asyncio.sleep(0.02)
                drafter.release([number, number + 1])
            return len(workers[0].messages) - before

        assert await serve(0) >= 100
        workers[0].gate.clear()
        assert await serve(20) == 1
        workers[0].gate.set()
        await asyncio.sleep(0.1)
        assert await serve(40) >= 90

    run_virtually(steps())


async def test_under_the_ratio_rule_distributions_come_back_from_every_worker() -> None:
    """The rule goes out with each message, and with the drafts comes what they were drawn from."""
    drafter = RemoteDrafter("draft", engine_id="engine", context_limit=100, rule=Rule.RATIO)
    drafter.set_workers({"a": FakeHandle(Counting()), "b": FakeHandle(Counting())})
    for _ in range(2):
        drafts = await drafter.propose([query(i, [4]) for i in range(4)])
        expected = Draft(
            (5, 6), (DraftDistribution((5, 0), HALVES), DraftDistribution((6, 0), HALVES))
        )
        assert drafts == dict.fromkeys(range(4), expected)


async def test_workers_hear_of_ended_sequences() -> None:
    """What has ended is named with the next message, and no longer holds a place."""
    worker = Counting()
    drafter, _ = drafter_with(worker)
    await drafter.propose([query(1, [5]), query(2, [7])])
    drafter.release([1, 77])
    await drafter.propose([query(2, [7, 8])])
    assert worker.messages[1].finished == (1,)
    assert set(worker.contexts) == {2}


def test_a_drafter_that_was_closed_asks_nobody() -> None:
    """It tells its workers of every sequence, and nothing comes after that."""

    async def steps() -> None:
        worker = Counting()
        drafter, _ = drafter_with(worker)
        await drafter.propose([query(1, [5]), query(2, [7])])
        drafter.release([1])
        await drafter.close()
        assert not worker.contexts
        num_messages = len(worker.messages)
        drafter.release([2])
        await asyncio.sleep(10 * TIDY_SECONDS)
        assert len(worker.messages) == num_messages
        assert await reason(drafter, query(3, [5])) == "none"

    run_virtually(steps())
