"""The thread around a worker: one step at a time, off the event loop, errors and all."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cluster.errors import TargetUnavailable
from cluster.messages import StepInput, StepOutput
from cluster.worker import ThreadTarget


class Puppet:
    """A worker whose steps wait for the test, and note the thread they run in."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: list[str] = []
        self.finished: list[int] = []

    def step(self, step: StepInput) -> StepOutput:
        """Wait to be let go; a negative step id fails."""
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(120)
        if step.step_id < 0:
            raise KeyError(step.step_id)
        self.finished.append(step.step_id)
        return StepOutput(step.step_id, ())


@pytest.fixture
def puppet() -> Puppet:
    return Puppet()


@pytest.fixture
def target(puppet: Puppet) -> Iterator[ThreadTarget]:
    target = ThreadTarget(puppet)  # type: ignore[arg-type]
    yield target
    puppet.go.set()
    target.close()


async def test_steps_run_in_one_thread_that_is_not_the_loops(
    target: ThreadTarget, puppet: Puppet
) -> None:
    """The event loop stays free during a step, and all steps share one thread."""
    steps = [asyncio.create_task(target.step(StepInput(i, ()))) for i in range(3)]
    await asyncio.sleep(0.01)  # would never come back if the step held the loop
    puppet.go.set()
    assert [(await one).step_id for one in steps] == [0, 1, 2]
    assert len(set(puppet.threads)) == 1
    assert puppet.threads[0].startswith("target")


async def test_a_failing_step_raises_what_it_raised(target: ThreadTarget, puppet: Puppet) -> None:
    """The original error reaches the engine, and the next step runs."""
    puppet.go.set()
    with pytest.raises(KeyError, match="-1"):
        await target.step(StepInput(-1, ()))
    assert await target.step(StepInput(2, ())) == StepOutput(2, ())


async def test_a_cancelled_step_is_finished_before_the_next(
    target: ThreadTarget, puppet: Puppet
) -> None:
    """Two steps never touch the KV memory at once."""
    first = asyncio.create_task(target.step(StepInput(1, ())))
    await asyncio.sleep(0.01)
    first.cancel()
    second = asyncio.create_task(target.step(StepInput(2, ())))
    await asyncio.sleep(0.01)
    puppet.go.set()
    await second
    assert puppet.finished == [1, 2]
    assert first.cancelled()


async def test_a_closed_target_is_unavailable(target: ThreadTarget) -> None:
    """After close no step begins, and the error is the one the protocol names."""
    target.close()
    target.close()
    with pytest.raises(TargetUnavailable):
        await target.step(StepInput(1, ()))
