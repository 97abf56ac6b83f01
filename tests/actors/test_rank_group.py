"""A group of ranks: one answer of many calls, and one end for whatever ends any of them."""

import asyncio
import pickle
import threading
from collections.abc import Callable

import pytest

from cluster.actors import target as group_module
from cluster.actors.target import RankGroup, WaitingGroup
from cluster.errors import TargetUnavailable
from cluster.messages import StepInput, StepOutput
from cluster.processor import Processor
from cluster.rank import RankInfo
from tests.actors.fake_ray import FakeHandle
from tests.wire import PATIENCE_SECONDS, until

INFO = RankInfo(
    vocab_size=512,
    num_blocks=4,
    block_size=16,
    processor=Processor(name="A processor", num_threads=1, num_ranks=3),
)


class FakeRank:
    """Answers at once, or when it is let go; fails when it is told to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: list[int] = []
        self.noise: list[tuple[tuple[int, ...], int]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None

    async def step(self, packed: bytes) -> StepOutput | None:
        """Rank 0 has the answer."""
        step: StepInput = pickle.loads(packed)  # noqa: S301 - by the group
        self.steps.append(step.step_id)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return StepOutput(step.step_id, ()) if self.number == 0 else None

    async def write_noise(self, block_table: tuple[int, ...], num_tokens: int) -> None:
        """Note it."""
        self.noise.append((block_table, num_tokens))

    async def self_check(self) -> tuple[str, ...]:
        """Two ranks find something, one of it the same."""
        return {0: (), 1: ("single rows",), 2: ("prompt chunks", "single rows")}[self.number]

    async def outlive(self) -> None:
        """Pend."""
        await asyncio.Event().wait()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[FakeHandle]:
    """Whom Ray was told to kill."""
    killed: list[FakeHandle] = []

    def kill(handle: FakeHandle) -> None:
        killed.append(handle)
        handle.kill()

    monkeypatch.setattr(group_module.ray, "kill", kill)
    monkeypatch.setattr(group_module, "LOOK_AROUND_SECONDS", 0.01)
    return killed


@pytest.fixture
async def handles() -> list[FakeHandle]:
    """Three ranks."""
    return [FakeHandle(FakeRank(number)) for number in range(3)]


@pytest.fixture
async def group(handles: list[FakeHandle], killed: list[FakeHandle]) -> RankGroup:
    """The three as one."""
    del killed
    return RankGroup(handles, INFO)  # type: ignore[arg-type]


def ranks(handles: list[FakeHandle]) -> list[FakeRank]:
    return [handle.instance for handle in handles]  # type: ignore[misc]


async def test_every_rank_is_called_and_the_first_answers(
    group: RankGroup, handles: list[FakeHandle]
) -> None:
    """A step goes to all of them; a rank that is slower is not waited for."""
    ranks(handles)[2].go.clear()
    assert await group.step(StepInput(1, ())) == StepOutput(1, ())
    assert await group.step(StepInput(2, ())) == StepOutput(2, ())
    assert [rank.steps for rank in ranks(handles)] == [[1, 2]] * 3


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_death_in_a_step_ends_the_group(
    group: RankGroup, handles: list[FakeHandle], killed: list[FakeHandle], number: int
) -> None:
    """The step fails with the rank's name though rank 0 would wait, and no rank is left."""
    for rank in ranks(handles):
        rank.go.clear()
    step = asyncio.create_task(group.step(StepInput(1, ())))
    await asyncio.sleep(0)
    handles[number].kill()
    with pytest.raises(TargetUnavailable, match=f"rank {number} of 3 died"):
        await step
    assert set(map(id, killed)) == set(map(id, handles))
    with pytest.raises(TargetUnavailable, match=f"rank {number} of 3 died"):
        await group.step(StepInput(2, ()))


async def test_a_death_between_steps_is_heard_of(
    group: RankGroup, handles: list[FakeHandle], killed: list[FakeHandle]
) -> None:
    """Nobody has to step for it."""
    handles[1].kill()
    await until(lambda: bool(killed))
    with pytest.raises(TargetUnavailable, match="rank 1 of 3 died"):
        await group.step(StepInput(1, ()))


def dies(handle: FakeHandle, rank: FakeRank) -> None:
    """The rank's process ends."""
    del rank
    handle.kill()


def fails(handle: FakeHandle, rank: FakeRank) -> None:
    """The rank raises."""
    del handle
    rank.error = MemoryError("no more")
    rank.go.set()


@pytest.mark.parametrize(("first", "said"), [(dies, "died"), (fails, "MemoryError")])
async def test_the_first_error_is_told_and_not_what_others_say_of_it(
    group: RankGroup,
    handles: list[FakeHandle],
    first: Callable[[FakeHandle, FakeRank], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 hears of rank 2 through a broken exchange, and is heard before rank 2's own end."""
    monkeypatch.setattr(group_module, "LOOK_AROUND_SECONDS", PATIENCE_SECONDS)  # however late
    leader, _, culprit = ranks(handles)
    culprit.go.clear()
    leader.error = TargetUnavailable("rank 0 does not reach the others: closed by peer")
    step = asyncio.create_task(group.step(StepInput(1, ())))
    await until(lambda: 0 in group._errors)
    first(handles[2], culprit)
    await until(lambda: 2 in group._errors)
    group._end_for_a_reason()
    with pytest.raises(TargetUnavailable, match=f"rank 2 of 3 .*{said}"):
        await step


async def test_a_cancelled_step_harms_nobody(group: RankGroup, handles: list[FakeHandle]) -> None:
    """An engine that ends leaves its step running, as with a target in its own process."""
    ranks(handles)[0].go.clear()
    step = asyncio.create_task(group.step(StepInput(1, ())))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    ranks(handles)[0].go.set()
    assert await group.step(StepInput(2, ())) == StepOutput(2, ())


async def test_a_closed_group_is_unavailable(
    group: RankGroup, handles: list[FakeHandle], killed: list[FakeHandle]
) -> None:
    """Closing ends every rank once, and is no failure."""
    group.close()
    group.close()
    assert len(killed) == len(handles)
    with pytest.raises(TargetUnavailable, match="closed"):
        await group.step(StepInput(1, ()))


async def test_a_thread_may_wait_for_the_group(group: RankGroup, handles: list[FakeHandle]) -> None:
    """Profiling and the self-check reach every rank from the thread that builds the engine."""
    worker = WaitingGroup.of(group)

    def build() -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert worker.step(StepInput(3, ())) == StepOutput(3, ())
        worker.cache.write_noise((0, 1), 20)
        assert worker.self_check() == ("single rows", "prompt chunks")

    await asyncio.to_thread(build)
    assert [rank.noise for rank in ranks(handles)] == [[((0, 1), 20)]] * 3
    assert (worker.vocab_size, worker.cache.block_size, worker.cache.num_blocks) == (512, 16, 4)
    assert worker.processor.num_ranks == 3
