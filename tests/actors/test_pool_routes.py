"""Which engine a gateway's requests go to, which they leave, and which they do not get to."""

import asyncio
from dataclasses import replace

import pytest

from cluster.actors import link as link_module
from cluster.actors import pool as pool_module
from cluster.actors.pool import EnginePool
from cluster.errors import Overloaded, TargetUnavailable
from tests.actors.fake_ray import FakeHandle
from tests.actors.test_pool import (
    INFO,
    Start,
    collect,
    expected,
    idle,
    long_request,
    pool_of,
    start,
    until,
)
from tests.harness import make_request

__all__ = ["start"]


class Stopped:
    """A handle to a process that SIGSTOP and SIGCONT reach: what it would answer comes later."""

    def __init__(self, handle: FakeHandle) -> None:
        self.handle = handle
        self.runs = asyncio.Event()
        self.runs.set()

    def __getattr__(self, name: str) -> "_Method":
        return _Method(self, name)


class _Method:
    def __init__(self, stopped: Stopped, name: str) -> None:
        self._stopped = stopped
        self._method = getattr(stopped.handle, name)

    def options(self, **options: object) -> "_Method":
        """Whatever they are."""
        del options
        return self

    def remote(self, *args: object, **kwargs: object) -> object:
        """What comes passes when the process runs."""
        answer = self._method.remote(*args, **kwargs)
        if hasattr(answer, "__aiter__"):
            return self._items(answer)
        task = asyncio.create_task(self._later(answer))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(task)

    async def _items(self, items: object) -> object:
        async for item in items:  # type: ignore[attr-defined]
            await self._stopped.runs.wait()
            yield item

    async def _later(self, answer: object) -> object:
        result = await answer  # type: ignore[misc]
        await self._stopped.runs.wait()
        return result


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed in a moment."""
    monkeypatch.setattr("cluster.actors.engine.HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(link_module, "STALLED_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "WATCH_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
async def test_x73_a_stopped_engines_streams_go_on_elsewhere_and_its_late_words_are_dropped(
    start: Start,
) -> None:
    """Silent with requests under way: they move, exactly; what it says later changes nothing."""
    stopped, other = Stopped(start()), start()
    pool = await pool_of(stopped, other)
    [link, _] = pool._links.values()
    requests = [long_request(f"r{i}", seed=i) for i in range(6)]
    answers = [asyncio.create_task(collect(pool, request)) for request in requests]
    await until(lambda: link.num_under_way > 0 and not idle(stopped.handle))
    stopped.runs.clear()
    assert await asyncio.gather(*answers) == [expected(request) for request in requests]
    stopped.runs.set()
    await until(lambda: idle(stopped.handle))
    await until(lambda: link.accepts and link.stalled is None)
    again = long_request("again", seed=9)
    assert await collect(pool, again) == expected(again)
    pool.close()


@pytest.mark.usefixtures("soon")
async def test_a_lone_engines_silence_moves_nothing(start: Start) -> None:
    """With nowhere to go its requests wait, and go on where they were when it is back."""
    stopped = Stopped(start())
    pool = await pool_of(stopped)
    [link] = pool._links.values()
    request = long_request()
    answer = asyncio.create_task(collect(pool, request))
    await until(lambda: not idle(stopped.handle))
    stopped.runs.clear()
    await until(lambda: link.stalled is not None)
    await asyncio.sleep(0.2)
    assert link.num_under_way == 1
    stopped.runs.set()
    assert await answer == expected(request)
    pool.close()


async def test_a_conversation_goes_back_to_the_engine_that_holds_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines tell what they hold, and the next turn, prompt and answer and more, goes there."""
    monkeypatch.setattr("cluster.engine.load.PREFIX_SECONDS", 0.0)
    monkeypatch.setattr("cluster.actors.engine.HEARTBEAT_SECONDS", 0.02)
    handles = start(), start(), start()
    pool = await pool_of(*handles)
    prompt = [number % 32 for number in range(100)]
    first = make_request(prompt, request_id="first", ignore_eos=True, max_tokens=40)
    answer = await collect(pool, first)
    links = list(pool._links.values())
    await until(lambda: any(link.standing.prefixes for link in links))
    [home] = [link.engine_id for link in links if link.standing.prefixes]
    for turn in range(3):
        later = make_request([*prompt, *answer.token_ids, turn, 1], request_id=f"{turn}")
        [delta, *_] = [delta async for delta in pool.generate(later)]
        assert delta.num_cached_tokens > 100
    assert [link.engine_id for link in links if link.standing.prefixes] == [home]
    pool.close()


async def test_x78_what_cannot_begin_in_time_is_refused_here(start: Start) -> None:
    """Refused by what is known, without a word to the engine; what is under way is unaffected."""
    handle = start(max_num_seqs=1)
    pool = await pool_of(handle)
    requests = [long_request(f"r{i}", seed=i) for i in range(4)]
    answers = [asyncio.create_task(collect(pool, request)) for request in requests]
    await until(lambda: not idle(handle))
    submitted = handle.instance._engine._num_submitted
    with pytest.raises(Overloaded, match="deadline") as refused:
        await collect(pool, replace(long_request("late"), deadline_seconds=1e-6))
    assert refused.value.retry_seconds > 0
    assert handle.instance._engine._num_submitted == submitted
    assert await asyncio.gather(*answers) == [expected(request) for request in requests]
    pool.close()


async def test_a_full_engine_is_passed_over(start: Start) -> None:
    """What one engine refuses another may take; when none does the refusal is the caller's."""
    handles = start(max_num_seqs=1, max_num_waiting=1), start(max_num_seqs=1, max_num_waiting=1)
    pool = await pool_of(*handles)
    answers = [asyncio.create_task(collect(pool, long_request(f"r{i}", seed=i))) for i in range(9)]
    done, _ = await asyncio.wait(answers)
    refused = [task for task in done if isinstance(task.exception(), Overloaded)]
    kept = [task.result() for task in done if task.exception() is None]
    assert len(refused) >= 3
    assert len(kept) >= 4
    assert set(kept) <= {expected(long_request(seed=i)) for i in range(9)}
    pool.close()


async def test_x72_streams_of_a_dead_engine_are_let_in_where_the_queue_is_full(
    start: Start,
) -> None:
    """No stream that has begun is broken by a bound."""
    dying, full = start(max_num_seqs=1), start(max_num_seqs=1, max_num_waiting=1)
    pool = await pool_of(dying)
    request = long_request("mine", seed=5)
    answer = asyncio.create_task(collect(pool, request))
    await until(lambda: dying.instance._engine.load().tokens_per_step > 0)
    others = await pool_of(full)
    rest = [asyncio.create_task(collect(others, long_request(f"o{i}", seed=i))) for i in range(2)]
    await until(lambda: full.instance._engine.load().running > 0)
    pool.set_engines({"engine-0": dying, "engine-1": full})
    dying.kill()
    assert await answer == expected(request)
    await asyncio.gather(*rest)
    pool.close()
    others.close()


async def test_a_stream_without_an_engine_ends_before_its_deadline_does(start: Start) -> None:
    """Whoever waits for a replacement is told in time that there is none."""
    handle = start()
    pool = await pool_of(handle, patience_seconds=60.0)
    request = replace(long_request(), deadline_seconds=0.5)
    answer = asyncio.create_task(collect(pool, request))
    await until(lambda: not idle(handle))
    handle.kill()
    with pytest.raises(TargetUnavailable) as lost:
        async with asyncio.timeout(10.0):
            await answer
    assert lost.value.retry_seconds is not None
    pool.close()


async def test_x77_before_the_first_engine_the_caller_is_told_when_to_try_again() -> None:
    """Unavailable, with a hint, and nothing waited for."""
    pool = EnginePool("gateway", INFO)
    with pytest.raises(TargetUnavailable) as refused:
        await collect(pool, long_request())
    assert refused.value.retry_seconds is not None
    pool.close()


async def test_a_fault_of_ours_is_no_lost_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine raises by mistake reaches the caller, and takes no engine away."""
    handle = start()
    pool = await pool_of(handle)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(handle.instance._engine, "submit", broken)
    with pytest.raises(ZeroDivisionError):
        await collect(pool, long_request())
    assert pool.ready()
    pool.close()


async def test_a_dead_engine_is_said_to_be_gone_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """While membership still names it nobody asks for it again: one line for one death."""
    handles = {"engine-0": start(), "engine-1": start()}
    pool = await pool_of(*handles.values())
    link = pool._links["engine-0"]
    handles["engine-0"].kill()
    await until(lambda: link.closed)
    for _ in range(3):
        pool.set_engines(handles)
        await asyncio.sleep(0.01)
    assert pool._links.keys() == {"engine-1"}
    assert caplog.text.count("the engine is gone") == 1
    pool.close()
