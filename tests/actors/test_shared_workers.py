"""Engines that share draft workers, by leases that change, through deaths, to the last context."""

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.actors.remote_drafter import TIDY_SECONDS, RemoteDrafter
from cluster.drafters.contexts import DraftContexts
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Resync, SamplingSpec
from tests.actors.fake_ray import FakeDraftWorker, FakeHandle
from tests.virtual_time import run_virtually

NAMES = ("a", "b", "c")
ENGINES = ("x", "y")
GREEDY = SamplingSpec(seed=0)


class Worker(FakeDraftWorker):
    """The real bookkeeping of a draft worker; its draft is the length of the context."""

    def __init__(self) -> None:
        self.contexts = DraftContexts(64)
        self.version = 0

    async def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """Takes some time."""
        contexts = self.contexts.receive(message)
        await asyncio.sleep(0.001)
        drafts: dict[int, Draft | Resync] = {
            seq_id: Resync()
            if context is None
            else Draft((len(context.token_ids),), version=self.version)
            for seq_id, context in contexts.items()
        }
        return ExchangeOutput(message.step_id, drafts)

    def held(self) -> set[tuple[str, int]]:
        """Engine and sequence of each context."""
        return {(engine.split("/")[0], seq_id) for engine, seq_id in self.contexts._contexts}


class World:
    """Two engines' ways to the same workers."""

    def __init__(self) -> None:
        self.num_started = 0
        self.handles: dict[str, FakeHandle] = {}
        self.drafters = {
            engine: RemoteDrafter("draft", engine_id=engine, context_limit=1000, weighs=False)
            for engine in ENGINES
        }
        self.texts: dict[str, dict[int, list[int]]] = {engine: {} for engine in ENGINES}

    def lease(self, engine: str, names: set[str]) -> None:
        """The router's say; a worker that is not there yet is started."""
        for name in names - self.handles.keys():
            self.handles[name] = FakeHandle(Worker())
        told = {name: len(self.worker(name).contexts) for name in names}
        handles = {name: self.handles[name] for name in names}
        self.drafters[engine].set_workers(handles, num_sequences=told)

    def kill(self, name: str) -> None:
        """A process ends; one that takes its place has another name."""
        if name in self.handles:
            self.handles.pop(name).kill()

    def worker(self, name: str) -> Worker:
        """The object behind a handle."""
        worker = self.handles[name].instance
        assert isinstance(worker, Worker)
        return worker

    async def step(self, engine: str) -> set[int]:
        """Propose for all of an engine's sequences; which of them got a draft."""
        texts = self.texts[engine]
        queries = [
            DraftQuery(seq_id=seq_id, token_ids=text, num_wanted=1, sampling=GREEDY)
            for seq_id, text in texts.items()
        ]
        try:
            drafts = await self.drafters[engine].propose(queries)
        except DrafterUnavailable:
            return set()
        for seq_id, draft in drafts.items():
            assert draft.token_ids == (len(texts[seq_id]),)
        for text in texts.values():
            text.append(0)
        return {seq_id for seq_id, draft in drafts.items() if draft.token_ids}


ACTIONS = st.one_of(
    st.tuples(st.just("lease"), st.sampled_from(ENGINES), st.sets(st.sampled_from(NAMES))),
    st.tuples(st.just("kill"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("start"), st.sampled_from(ENGINES), st.integers(1, 3)),
    st.tuples(st.just("end"), st.sampled_from(ENGINES), st.integers(0, 5)),
    st.tuples(st.just("step"), st.sampled_from(ENGINES), st.integers(1, 3)),
)


async def act(world: World, action: tuple[str, str, object]) -> None:
    match action:
        case ("lease", engine, set(names)):
            world.lease(engine, names)
        case ("kill", name, _):
            world.kill(name)
        case ("start", engine, int(number)):
            for _ in range(number):
                world.num_started += 1
                world.texts[engine][world.num_started] = [1, 2, 3]
        case ("end", engine, int(place)):
            texts = world.texts[engine]
            if texts:
                seq_id = list(texts)[place % len(texts)]
                del texts[seq_id]
                world.drafters[engine].release([seq_id])
        case ("step", engine, int(number)):
            for _ in range(number):
                await world.step(engine)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=30))
def test_no_sequence_is_at_two_workers_and_none_outlives_its_end(
    actions: Sequence[tuple[str, str, object]],
) -> None:
    """Through loss, addition and change of leases: then each running sequence is drafted for.

    When all is quiet a context is held where its sequence is, by a worker that is leased, and
    nowhere else; and when all sequences have ended nothing is held at all.
    """

    async def run() -> None:
        world = World()
        for action in actions:
            await act(world, action)
        for engine in ENGINES:
            world.lease(engine, {"a", "c"})
        for _ in range(12):  # deaths are found, contexts sent anew
            for engine in ENGINES:
                got = await world.step(engine)
        await asyncio.sleep(3 * TIDY_SECONDS)
        for engine in ENGINES:
            got = await world.step(engine)
            assert got == world.texts[engine].keys()
        running = [(engine, seq_id) for engine in ENGINES for seq_id in world.texts[engine]]
        held = [key for name in world.handles for key in world.worker(name).held()]
        assert sorted(held) == sorted(running)
        for engine in ENGINES:
            world.drafters[engine].release(list(world.texts[engine]))
        await asyncio.sleep(3 * TIDY_SECONDS)
        assert [world.worker(name).held() for name in world.handles] == [set()] * len(world.handles)

    run_virtually(run())


def test_a_worker_out_of_the_lease_forgets_although_it_was_busy() -> None:
    """Its last answer is waited for, then it is told of all that it held."""

    async def run() -> None:
        world = World()
        world.lease("x", {"a"})
        world.texts["x"] = {1: [1], 2: [1, 2]}
        await world.step("x")
        asking = asyncio.create_task(world.step("x"))
        await asyncio.sleep(0)
        world.lease("x", {"b"})
        await asking
        await asyncio.sleep(0.1)
        assert world.worker("a").held() == set()
        await world.step("x")
        assert world.worker("b").held() == {("x", 1), ("x", 2)}

    run_virtually(run())


def test_what_old_weights_brought_is_not_held_against_new_ones() -> None:
    """With the first draft of another version a worker's gain is learned anew."""

    async def run() -> None:
        world = World()
        world.lease("x", {"a"})
        world.texts["x"] = {seq_id: [1] for seq_id in range(4)}
        for _ in range(12):
            await world.step("x")
        [link] = world.drafters["x"]._workers.values()
        assert link.gain.tokens == 0
        world.worker("a").version = 1
        await world.step("x")
        assert link.gain.tokens is None

    run_virtually(run())
