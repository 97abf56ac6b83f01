"""Drafts fail open: whatever a drafter does, what comes back can be verified."""

import asyncio
import logging
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from cluster.engine.proposer import Proposer
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, SamplingSpec
from cluster.metrics import EngineMetrics
from tests.fakes import DyingDrafter, FakeDrafter, FakeModel, LateDrafter, SameDrafter
from tests.harness import series

MODEL = FakeModel()
QUERY = DraftQuery(seq_id=3, token_ids=[1, 2], num_wanted=4, sampling=SamplingSpec(seed=1))


def make_proposer(
    drafter: FakeDrafter, metrics: EngineMetrics, deadline_seconds: float = 5.0
) -> Proposer:
    return Proposer(
        drafter, deadline_seconds=deadline_seconds, vocab_size=MODEL.vocab_size, metrics=metrics
    )


class Saying(FakeDrafter):
    """Answers with exactly these ids."""

    def __init__(self, token_ids: object) -> None:
        super().__init__(MODEL)
        self._token_ids = token_ids

    async def propose(self, queries: object) -> dict[int, Draft]:
        """These, whatever is asked."""
        del queries
        return {3: Draft(self._token_ids)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "used"),
    [
        ((), ()),
        ((5,), (5,)),
        ((5, 6, 7, 8, 9), (5, 6, 7, 8)),
        ((5, 32, 6), (5,)),
        ((5, -1, 6), (5,)),
        ((5, 6.0), (5,)),
        ((True,), ()),
        (("5",), ()),
        ([5, 6], (5, 6)),
    ],
)
async def test_what_is_used_is_wanted_and_in_the_vocabulary(
    said: object, used: tuple[int, ...], metrics: EngineMetrics
) -> None:
    """A draft is cut to what was wanted, and before the first id that is no token."""
    assert await make_proposer(Saying(said), metrics).propose([QUERY]) == {3: Draft(used)}


async def test_without_queries_nobody_is_asked(metrics: EngineMetrics) -> None:
    """K = 0 is plain decoding: no drafter call."""
    drafter = SameDrafter(MODEL)
    assert await make_proposer(drafter, metrics).propose([]) == {}
    assert drafter.queries == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DrafterUnavailable("busy"), "busy"),
        (DrafterUnavailable("died"), "died"),
        (DrafterUnavailable("a new word"), "died"),
        (ValueError("a bug"), "died"),
        (asyncio.CancelledError(), "died"),
        (TimeoutError(), "late"),
    ],
)
async def test_a_failing_drafter_costs_the_drafts_and_is_counted(
    error: BaseException, reason: str, registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    """Every failure of a drafter, its own bugs too, is a step without drafts."""
    proposer = make_proposer(DyingDrafter(MODEL, survives=0, error=error), metrics)
    assert await proposer.propose([QUERY]) == {}
    assert series(registry)[f"drafthouse_drafter_unavailable_total{{reason={reason}}}"] == 1


async def test_a_late_drafter_is_not_waited_for(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    """After the deadline the call is cancelled, and the next one is tried again."""
    proposer = make_proposer(LateDrafter(MODEL), metrics, deadline_seconds=0.01)
    assert await proposer.propose([QUERY]) == {}
    assert len((await proposer.propose([QUERY]))[3].token_ids) == 4
    assert series(registry)["drafthouse_drafter_unavailable_total{reason=late}"] == 1


async def test_cancelling_the_engine_is_not_a_drafters_failure(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    """A cancelled task stops, it does not go on without drafts."""
    task = asyncio.create_task(make_proposer(LateDrafter(MODEL), metrics).propose([QUERY]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert series(registry)["drafthouse_drafter_unavailable_total{reason=died}"] == 0


async def test_a_dead_drafter_is_one_line_in_the_log_not_thousands(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """x73: failures are counted each time and logged now and then."""
    proposer = make_proposer(DyingDrafter(MODEL, survives=0), metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            await proposer.propose([QUERY])
    assert len(caplog.records) == 1


async def test_a_drafter_that_cannot_forget_harms_nobody(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    """An error in `release` is the drafter's own."""

    class Clinging(FakeDrafter):
        """Forgets nothing."""

        def release(self, seq_ids: Iterable[int]) -> None:
            raise RuntimeError(seq_ids)

    make_proposer(Clinging(MODEL), metrics).release((1,))
    assert series(registry)["drafthouse_drafter_unavailable_total{reason=died}"] == 1
