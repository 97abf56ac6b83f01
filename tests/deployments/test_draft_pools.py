"""The router and draft weights: who may swap what, who gets which ref, and what is counted."""

import asyncio
import warnings
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import PydanticDeprecatedSince20

from cluster.actors import draft_weights
from cluster.actors.membership import Member, MemberKind
from cluster.errors import ConfigurationError, DrafterUnavailable
from cluster.messages import DraftLoad, DraftWeights, EngineLoad, VersionGrade
from tests.actors.fake_ray import FakeHandle

with warnings.catch_warnings(category=PydanticDeprecatedSince20, action="ignore"):
    from deployments.draft_pools import PoolKeeper


class Worker:
    """A draft worker as far as a swap is concerned."""

    async def reference(self) -> str:
        """The configured model."""
        return "/configured"


class Store:
    """Stands for the task that reads folders; its refs are numbers in futures."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str, str | None]] = []
        self.refused = ""

    def reading(self, folder: str, node_id: str, like: str | None) -> tuple[Any, Any]:
        """Begin to read."""
        self.read.append((folder, node_id, like))
        checked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.refused:
            checked.set_exception(ConfigurationError(self.refused))
        else:
            checked.set_result(None)
        return checked, f"ref {len(self.read)}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(draft_weights, "_reading", store.reading)
    return store


class Pools:
    """The keeper with its counts, and a worker of pool `p`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.keeper = PoolKeeper(self.registry)
        self.handle = FakeHandle(Worker())

    def hear(self, *grades: tuple[int, int, int], weights: DraftWeights | None = None) -> None:
        """The worker registers, and a second has passed."""
        self.keeper._next_judgement = 0.0
        load = DraftLoad(
            weights=weights or DraftWeights(),
            grades=tuple(
                VersionGrade(version=version, num_verified=verified, num_accepted=accepted)
                for version, verified, accepted in grades
            ),
        )
        self.keeper.hear(
            Member(kind=MemberKind.DRAFT, member_id="w", handle=self.handle, pool="p", load=load)
        )

    def value(self, name: str) -> float | None:
        """Of pool `p`."""
        self.keeper.publish()
        return self.registry.get_sample_value(name, {"pool": "p"})


async def test_a_swap_is_checked_read_once_and_given_to_all(store: Store) -> None:
    """Against the model the pool was configured with; every worker gets the same ref."""
    pools = Pools()
    pools.hear()
    assert pools.value("drafthouse_draft_swaps_total") == 0
    assert await pools.keeper.swap("p", "/new", "node") == 1
    assert store.read == [("/new", "node", "/configured")]
    assert pools.keeper.stored("p", 1) == pools.keeper.stored("p", 1) == ("ref 1",)
    assert pools.value("drafthouse_draft_swaps_total") == 1
    assert pools.value("drafthouse_draft_pool_version") == 1
    for other in (0, 2):
        assert pools.keeper.stored("p", other) == ()
    assert pools.keeper.stored("q", 1) == ()


async def test_what_does_not_fit_moves_nobody(store: Store) -> None:
    """The error says why, the pool keeps what it has, and the version number is not used up."""
    pools = Pools()
    pools.hear()
    store.refused = "num_layers: 3"
    with pytest.raises(ConfigurationError, match="num_layers: 3"):
        await pools.keeper.swap("p", "/odd", "")
    assert pools.keeper.weights["p"] == DraftWeights()
    store.refused = ""
    assert await pools.keeper.swap("p", "/new", "") == 1


async def test_a_pool_nobody_knows_is_named_with_those_there_are(store: Store) -> None:
    """Members without a draft worker's load make no pool."""
    pools = Pools()
    load = EngineLoad(running=0, waiting=0, free_blocks=0, step_id=0)
    engine = Member(kind=MemberKind.TARGET, member_id="t", handle=pools.handle, load=load)
    pools.keeper.hear(engine)
    with pytest.raises(ConfigurationError, match="no draft pool 'x'; there is none"):
        await pools.keeper.swap("x", "/new", "")
    pools.hear()
    with pytest.raises(ConfigurationError, match="no draft pool 'x'; there is 'p'"):
        await pools.keeper.swap("x", "/new", "")
    pools.handle.kill()
    with pytest.raises(DrafterUnavailable):
        await pools.keeper.swap("p", "/new", "")
    assert store.read == []


async def test_worse_weights_go_back_when_a_worker_says_so(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """By themselves, counted, with a line that has both rates; their ref is let go."""
    pools = Pools()
    pools.hear((0, 1000, 900))
    await pools.keeper.swap("p", "/bad", "")
    pools.hear((0, 1000, 900), (1, 500, 5))
    assert pools.keeper.weights["p"] == DraftWeights(version=0, turn=2)
    assert pools.value("drafthouse_draft_rollbacks_total") == 1
    assert pools.value("drafthouse_draft_pool_version") == 0
    assert "p returns to version 0: 0.900 of 1000" in caplog.text
    assert "0.010 of 500 since" in caplog.text
    assert pools.keeper._shelf._refs == {}
    assert len(store.read) == 1


async def test_what_is_returned_to_need_not_be_read_again(store: Store) -> None:
    """While a version is on trial the ref of the one before is kept."""
    pools = Pools()
    pools.hear((0, 1000, 500))
    await pools.keeper.swap("p", "/good", "")
    pools.hear((0, 1000, 500), (1, 9000, 5000))
    await pools.keeper.swap("p", "/bad", "")
    pools.hear((1, 1000, 500), (2, 1000, 10))
    assert pools.keeper.stored("p", 1) == ("ref 1",)
    assert len(store.read) == 2
    assert pools.keeper._shelf._refs.keys() == {("p", 1)}


async def test_a_router_that_begins_anew_reads_what_its_workers_draft_with(store: Store) -> None:
    """The refs of the one before ended with it; folder and node are known from the workers."""
    pools = Pools()
    pools.hear(weights=DraftWeights(version=3, turn=5, folder="/new", node_id="node"))
    assert pools.keeper.stored("p", 3) == pools.keeper.stored("p", 3) == ("ref 1",)
    assert store.read == [("/new", "node", None)]
