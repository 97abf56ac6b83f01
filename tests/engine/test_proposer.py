"""Drafts fail open: whatever a drafter does, what comes back can be verified."""

import asyncio
import logging
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from cluster.engine.proposer import Proposer
from cluster.errors import DrafterUnavailable
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, DraftDistribution, Rule, SamplingSpec
from cluster.metrics import EngineMetrics
from tests.fakes import DyingDrafter, FakeDrafter, FakeModel, LateDrafter, SameDrafter
from tests.harness import series

MODEL = FakeModel()
QUERY = DraftQuery(seq_id=3, token_ids=[1, 2], num_wanted=4, sampling=SamplingSpec(seed=1))


def make_proposer(
    drafter: FakeDrafter,
    metrics: EngineMetrics,
    deadline_seconds: float = 5.0,
    *,
    rule: Rule = Rule.COUPLED,
) -> Proposer:
    return Proposer(
        drafter,
        deadline_seconds=deadline_seconds,
        vocab_size=MODEL.vocab_size,
        metrics=metrics,
        rule=rule,
    )


class Saying(FakeDrafter):
    """Answers with exactly these ids, and these distributions."""

    def __init__(self, token_ids: object, distributions: object = ()) -> None:
        super().__init__(MODEL)
        self._draft = Draft(token_ids, distributions)  # type: ignore[arg-type]

    async def propose(self, queries: object) -> dict[int, Draft]:
        """These, whatever is asked."""
        del queries
        return {3: self._draft}


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


FAIR = DraftDistribution((5, 6), (0.25, 0.75))
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("token_ids", "distributions", "num_used"),
    [
        ((5, 6), (), 2),  # certain
        ((5, 6), (FAIR, FAIR), 2),
        ((5, 6, 5, 6, 5), (FAIR,) * 5, 4),  # more than wanted
        ((5, 32), (FAIR, FAIR), 1),
        ((5, 7), (FAIR, FAIR), 1),  # not drawn from what came with it
        ((5, 6), (FAIR, DraftDistribution((5, 6), (1.0, 0.0))), 1),
        ((5, 6), (FAIR,), 0),
        ((5, 6), (FAIR, FAIR, FAIR), 0),
        ((5, 6), (FAIR, DraftDistribution((), ())), 1),
        ((5, 6), (FAIR, DraftDistribution((5, 6), (0.25,))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, 6), (0.25, 0.75))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, 32), (0.25, 0.75))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, -1), (0.25, 0.75))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, 7.0), (0.25, 0.75))), 1),  # type: ignore[arg-type]
        ((5, 6), (FAIR, DraftDistribution((6, 7), (0.25, 0.7499))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, 7), (1.25, -0.25))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, 7), (NAN, 0.75))), 1),
        ((5, 6), (FAIR, DraftDistribution((6, 7), (INFINITY, 0.0))), 1),
        ((5, 6), (FAIR, DraftDistribution((6,), (1,))), 1),
    ],
)
async def test_under_ratio_only_a_draft_with_its_own_distribution_is_used(
    token_ids: tuple[int, ...],
    distributions: tuple[DraftDistribution, ...],
    num_used: int,
    metrics: EngineMetrics,
) -> None:
    """A draft ends before the first token whose distribution cannot be what it was drawn from."""
    drafter = Saying(token_ids, distributions)
    drafts = await make_proposer(drafter, metrics, rule=Rule.RATIO).propose([QUERY])
    assert drafts == {3: Draft(token_ids[:num_used], distributions[:num_used])}


@pytest.mark.parametrize("distributions", [None, (None, None), 7, ("a", "b")])
async def test_under_ratio_what_is_no_distribution_at_all_costs_the_draft(
    distributions: object, metrics: EngineMetrics, registry: CollectorRegistry
) -> None:
    """Nonsense in place of distributions never reaches the target, and is counted as a death."""
    proposer = make_proposer(Saying((5, 6), distributions), metrics, rule=Rule.RATIO)
    drafts = await proposer.propose([QUERY])
    died = series(registry)["drafthouse_drafter_unavailable_total{reason=died}"]
    assert (drafts, died) == (({3: Draft((5, 6))}, 0) if distributions is None else ({}, 1))


async def test_under_the_coupled_rule_distributions_do_not_travel(metrics: EngineMetrics) -> None:
    """Nobody reads them there."""
    drafts = await make_proposer(Saying((5, 6), (FAIR, FAIR)), metrics).propose([QUERY])
    assert drafts == {3: Draft((5, 6))}


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
