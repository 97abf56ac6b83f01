"""The adaptive policy in an engine: no token depends on it, and what does not pay is given up."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry

from cluster.control.adaptive import AdaptivePolicy
from cluster.control.cost import CostTable
from cluster.control.metrics import PolicyMetrics
from cluster.control.policy import StepShape
from cluster.engine.engine import Engine
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, Rule
from cluster.metrics import EngineMetrics
from tests.fakes import (
    EOS_TOKEN_ID,
    FakeDrafter,
    FakeModel,
    RandomDrafter,
    SameDrafter,
    SiblingDrafter,
)
from tests.harness import (
    SAMPLED,
    Recorder,
    ask,
    check_same,
    make_fake_target,
    make_limits,
    make_request,
    running,
    series,
)

LIMITS = make_limits(max_model_len=1200)


def cost() -> CostTable:
    """Rows are neither free nor dear next to a step."""
    return CostTable(
        {
            StepShape(num_sequences=1, num_rows=rows, num_context_tokens=100): 0.02 + 1e-3 * rows
            for rows in (1, 64)
        }
    )


def make_adaptive_engine(
    drafter: Drafter, registry: CollectorRegistry, *, rule: Rule = Rule.COUPLED
) -> tuple[Engine, AdaptivePolicy]:
    """An engine on a fake target."""
    policy = AdaptivePolicy(
        cost(),
        num_speculative_tokens=8,
        trims=rule is Rule.COUPLED,
        metrics=PolicyMetrics(registry, model="fake"),
    )
    engine = Engine(
        target=make_fake_target(LIMITS),
        drafter=drafter,
        policy=policy,
        limits=LIMITS,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        metrics=EngineMetrics(registry, model="fake", num_positions=8),
        rule=rule,
    )
    return engine, policy


async def answers(engine: Engine, *, max_tokens: int, num_requests: int) -> list[Recorder]:
    """Some sampled requests at once."""
    asked = [
        make_request(
            [5, 6, 7 + index],
            request_id=str(index),
            sampling=SAMPLED,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for index in range(num_requests)
    ]
    async with running(engine):
        return await ask(engine, asked)


class LateDrafter(FakeDrafter):
    """Answers well for a while, then no more."""

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """Hangs from the 20th call on."""
        if len(self.queries) > 20:
            await asyncio.sleep(3600)
        return await super().propose(queries)

    def draft(self, query: DraftQuery) -> Sequence[int]:
        """The target's own tokens."""
        return SameDrafter(self.model).draft(query)


@pytest.mark.parametrize("drafter", [SameDrafter, RandomDrafter])
async def test_no_token_depends_on_the_policy(drafter: Callable[[FakeModel], FakeDrafter]) -> None:
    """Every answer is the fake model's own, and nothing is left of any sequence."""
    engine, policy = make_adaptive_engine(
        drafter(FakeModel(LIMITS.vocab_size)), CollectorRegistry()
    )
    check_same(await answers(engine, max_tokens=100, num_requests=4), LIMITS)
    assert policy.num_sequences == 0


async def test_x16_a_random_drafter_is_not_asked_any_more() -> None:
    """1,000 tokens: in the second half there is hardly a draft, and a metric says so."""
    registry = CollectorRegistry()
    drafter = RandomDrafter(FakeModel(LIMITS.vocab_size))
    engine, policy = make_adaptive_engine(drafter, registry)
    await answers(engine, max_tokens=1000, num_requests=1)
    values = series(registry)
    late = [query for query in drafter.queries if query[1] > 500]
    assert len(late) < 50
    assert policy.drafting is False
    assert values["drafthouse_policy_regime{state=drafting}"] == 0
    changes = [value for name, value in values.items() if "changes_total{to=plain," in name]
    assert sum(changes) >= 1


async def test_a_drafter_that_is_always_right_is_asked_for_all() -> None:
    """Most steps bring 9 tokens."""
    drafter = SameDrafter(FakeModel(LIMITS.vocab_size))
    engine, _ = make_adaptive_engine(drafter, CollectorRegistry())
    [recorder] = await answers(engine, max_tokens=900, num_requests=1)
    assert len(recorder.deltas) < 150


async def test_a_drafter_that_hangs_costs_one_wait_and_some_short_ones() -> None:
    """It is waited for as long as its drafts were worth, far less than the deadline each time."""
    drafter = LateDrafter(FakeModel(LIMITS.vocab_size))
    registry = CollectorRegistry()
    engine, _ = make_adaptive_engine(drafter, registry)
    check_same(await answers(engine, max_tokens=400, num_requests=1), LIMITS)
    values = series(registry)
    assert 1 <= values["drafthouse_drafter_unavailable_total{reason=late}"] < 40
    assert values["drafthouse_step_seconds_sum{phase=draft}"] < LIMITS.draft_deadline_seconds / 2


@pytest.mark.parametrize("kind", [SameDrafter, SiblingDrafter, RandomDrafter])
async def test_under_the_ratio_rule_nothing_that_came_is_cut(
    kind: Callable[[FakeModel], FakeDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much is asked is decided before; how much came is how much is verified."""
    registry = CollectorRegistry()
    drafter = kind(FakeModel(LIMITS.vocab_size))
    came: list[int] = []
    propose = drafter.propose

    async def counted(queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        drafts = await propose(queries)
        came.extend(len(draft.token_ids) for draft in drafts.values())
        return drafts

    monkeypatch.setattr(drafter, "propose", counted)
    engine, _ = make_adaptive_engine(drafter, registry, rule=Rule.RATIO)
    recorders = await answers(engine, max_tokens=60, num_requests=2)
    asked = series(registry)["drafthouse_policy_asked_tokens_total"]
    assert 0 < sum(recorder.num_drafted for recorder in recorders) == sum(came) <= asked
