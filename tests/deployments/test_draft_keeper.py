"""What keeps a draft worker: its life, its pool's weights, and a router that comes and goes."""

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import PydanticDeprecatedSince20
from ray.exceptions import RayActorError

from cluster.actors.membership import Member, Snapshot
from cluster.config import DrafthouseConfig, ModelDrafterConfig, parse_config
from cluster.errors import ConfigurationError
from cluster.messages import DraftLoad, DraftWeights
from tests.actors.fake_ray import FakeHandle
from tests.virtual_time import run_virtually

with warnings.catch_warnings(category=PydanticDeprecatedSince20, action="ignore"):
    # Ray's own, when Serve is imported first.
    from deployments import draft_keeper
    from deployments.colocated import beside
    from deployments.draft import draft_deployments
    from deployments.draft_keeper import DraftKeeper

DRAFTER = ModelDrafterConfig(model="/model", name="p", resources={"CPU": 1})
SECOND = 1.01  # a little more than keepers take to hear of anything


class Worker:
    """A draft worker that takes a moment to load weights."""

    def __init__(self) -> None:
        self.version = 0
        self.told: list[tuple[int, object]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def load(self) -> DraftLoad:
        """As it is."""
        await self.answers.wait()
        return DraftLoad(version=self.version, num_sequences=len(self.told))

    async def adopt(self, version: int, *stored: object) -> None:
        """Load them, not at once."""
        self.told.append((version, *stored))  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(0.5, setattr, self, "version", version)


class Router:
    """What a pool is to draft with, and who has registered last."""

    def __init__(self) -> None:
        self.weights = DraftWeights()
        self.heard: list[Member] = []
        self.removed: list[str] = []
        self.is_up = True

    async def register(self, member: Member | None, known: int | None = None) -> Snapshot:
        """Hear of a member."""
        del known
        self._check()
        if member is not None:
            self.heard.append(member)
        return Snapshot(weights={"p": self.weights}, complete=True)

    async def remove(self, member_id: str) -> None:
        """A member leaves."""
        self.removed.append(member_id)

    async def draft_weights(self, pool: str, version: int) -> tuple[object, ...]:
        """Of the version it wants, unless that is configured, and nothing of others."""
        self._check()
        assert pool == "p"
        return ("stored",) if version == self.weights.version > 0 else ()

    def _check(self) -> None:
        if not self.is_up:
            raise RayActorError


class House:
    """A router, and the workers that keepers started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.router = Router()
        self.workers: list[FakeHandle] = []
        self.bundles: list[int] = []

        def start_child(*args: object, bundle: int) -> FakeHandle:
            del args
            self.workers.append(FakeHandle(Worker()))
            self.bundles.append(bundle)
            return self.workers[-1]

        monkeypatch.setattr(draft_keeper, "start_child", start_child)
        monkeypatch.setattr(draft_keeper.ray, "kill", lambda handle: handle.kill())

    def worker(self, place: int = -1) -> Any:  # noqa: ANN401 - a fake
        """The object behind a handle."""
        return self.workers[place].instance

    @property
    def last(self) -> Member:
        """Who registered last."""
        return self.router.heard[-1]

    async def keeper(self) -> DraftKeeper:
        """One that has begun."""
        router: Any = FakeHandle(self.router)
        return await DraftKeeper.begin(DrafthouseConfig(), DRAFTER, router, bundle=3)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[House], Awaitable[None]]], None]:
    """Runs something in a house, in virtual time."""

    def run(work: Callable[[House], Awaitable[None]]) -> None:
        async def inside() -> None:
            await work(House(monkeypatch))

        run_virtually(inside())

    return run


def test_a_worker_registers_with_its_pool_and_load(house: Any) -> None:  # noqa: ANN401
    """It is known under its pool's name, says how it is, and leaves when its keeper ends."""

    async def work(house: House) -> None:
        keeper = await house.keeper()
        assert house.bundles == [3]
        house.worker().told.append((0,))
        await asyncio.sleep(SECOND)
        assert (house.last.pool, house.last.load) == ("p", DraftLoad(num_sequences=1))
        assert keeper.load == DraftLoad(num_sequences=1)
        await keeper.end()
        assert house.router.removed == [house.last.member_id]
        assert house.workers[0].dead.is_set()

    house(work)


def test_new_weights_are_loaded_once_and_told_of(house: Any) -> None:  # noqa: ANN401
    """One call for each change; what the worker registers with is what it was told, and has."""

    async def work(house: House) -> None:
        keeper = await house.keeper()
        house.router.weights = DraftWeights(version=1, turn=1, folder="/new")
        await asyncio.sleep(3 * SECOND)
        assert house.worker().told == [(1, "stored")]
        assert house.last.load == DraftLoad(
            version=1, num_sequences=1, weights=house.router.weights
        )
        house.router.weights = DraftWeights(version=0, turn=2)
        await asyncio.sleep(3 * SECOND)
        assert house.worker().told == [(1, "stored"), (0,)]
        assert keeper.load.version == 0
        await keeper.end()

    house(work)


def test_the_end_of_a_trial_moves_no_weights(house: Any) -> None:  # noqa: ANN401
    """The same version under a later turn is remembered, and not loaded again."""

    async def work(house: House) -> None:
        keeper = await house.keeper()
        trial = DraftWeights(version=1, turn=1, folder="/new", previous=DraftWeights())
        house.router.weights = trial
        await asyncio.sleep(3 * SECOND)
        house.router.weights = replace(trial, turn=2, previous=None)
        await asyncio.sleep(3 * SECOND)
        assert house.worker().told == [(1, "stored")]
        assert keeper.load.weights == house.router.weights
        await keeper.end()

    house(work)


def test_who_comes_later_begins_with_the_pools_weights(house: Any) -> None:  # noqa: ANN401
    """A new keeper asks first; a worker in a dead one's place is no member before it has them."""

    async def work(house: House) -> None:
        house.router.weights = DraftWeights(version=4, turn=6, folder="/new")
        keeper = await house.keeper()
        assert house.worker().version == 4
        await asyncio.sleep(SECOND)
        first = house.last.member_id
        house.workers[0].kill()
        await asyncio.sleep(3 * SECOND)
        assert len(house.workers) == 2
        second = [member for member in house.router.heard if member.member_id != first]
        assert second
        assert {member.load.version for member in second} == {4}  # type: ignore[union-attr]
        await keeper.end()

    house(work)


def test_without_a_router_the_weights_stay_as_they_are(house: Any) -> None:  # noqa: ANN401
    """One that knows nothing yet, or another version, moves nobody; what it cannot give waits."""

    async def work(house: House) -> None:
        keeper = await house.keeper()
        house.router.weights = DraftWeights(version=1, turn=5, folder="/new")
        await asyncio.sleep(3 * SECOND)
        house.router.is_up = False
        await asyncio.sleep(20 * SECOND)
        house.router.weights = DraftWeights()
        house.router.is_up = True
        await asyncio.sleep(3 * SECOND)
        assert house.worker().told == [(1, "stored")]
        house.workers[-1].kill()  # and the router has nothing to give
        await asyncio.sleep(draft_keeper.ADOPT_SECONDS + 5 * SECOND)
        assert keeper.load.version == 0
        assert keeper.load.weights.version == 1
        house.router.weights = DraftWeights(version=1, turn=5, folder="/new")
        await asyncio.sleep(2 * draft_keeper.RETRY_SECONDS)
        assert keeper.load.version == 1
        await keeper.end()

    house(work)


def test_a_worker_that_answers_nothing_is_replaced(house: Any) -> None:  # noqa: ANN401
    """Exchange progress is its health: a process that hangs is ended after STALL_SECONDS."""

    async def work(house: House) -> None:
        keeper = await house.keeper()
        house.worker().answers.clear()
        await asyncio.sleep(draft_keeper.STALL_SECONDS + 3 * SECOND)
        assert house.workers[0].dead.is_set()
        assert len(house.workers) == 2
        keeper.check()
        await keeper.end()

    house(work)


def drafters(*members: dict[str, object]) -> DrafthouseConfig:
    return parse_config({"drafter": {"kind": "choice", "drafters": list(members)}})


def test_each_pool_has_a_deployment_with_a_name_that_serve_takes() -> None:
    """One is Draft; several are told apart, whatever characters their names have."""
    one = parse_config({"drafter": {"kind": "model", "model": "org/a"}})
    assert list(draft_deployments(one.drafter)) == ["Draft"]
    assert draft_deployments(parse_config({}).drafter) == {}
    several = drafters(
        {"kind": "model", "model": "org/a"},
        {"kind": "model", "model": "org-a"},
        {"kind": "model", "model": "/a/b", "name": "big one", "placement": "colocated"},
        {"kind": "model", "model": "/a/b", "name": "int8", "dtype": "int8"},
    )
    assert {name: pool.pool for name, pool in draft_deployments(several.drafter).items()} == {
        "Draft-org-a": "org/a",
        "Draft-org-a-1": "org-a",
        "Draft-int8": "int8",
    }


def test_workers_beside_a_target_have_a_bundle_each() -> None:
    """As many as the pool has replicas, in the order of the pools."""
    config = drafters(
        {"kind": "ngram"},
        {"kind": "model", "model": "a", "placement": "colocated", "num_replicas": 2},
        {"kind": "model", "model": "b"},
        {"kind": "model", "model": "c", "placement": "colocated"},
    )
    assert [model.pool for model in beside(config.drafter)] == ["a", "a", "c"]


def test_pools_of_one_name_are_refused() -> None:
    """Their drafts, metrics and weights could not be told apart."""
    with pytest.raises(ConfigurationError, match="several are named 'a'; give each a name"):
        drafters({"kind": "model", "model": "a"}, {"kind": "model", "model": "a", "dtype": "int8"})
    with pytest.raises(ConfigurationError, match="several are named 'a'"):
        drafters({"kind": "model", "model": "a"}, {"kind": "model", "model": "b", "name": "a"})
