"""`drafthouse compare-drafts`: drafts for one target beside one another, predicted and measured.

Every draft is checked first; what does not fit is left out, and why is said. Then all engines (no
drafts, and each draft with each K) answer the same prompts in turn, as in `bench engine`. Before
that each answers some waves that are not counted, at the lowest and the highest concurrency: what
steps and drafts cost there, and what becomes of drafts by kind of text, is all that predictions
are made of.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain

from cluster.config import TargetConfig
from cluster.control.cost import CostTable
from cluster.errors import ConfigurationError
from cluster.tools.bench.engine import WARM_UP_TOKENS, in_turn, target_config
from cluster.tools.bench.lanes import Lab, Lane, Variant, open_lab
from cluster.tools.bench.progress import Report
from cluster.tools.choosing.calibration import (
    Observed,
    RecordedPolicy,
    correct,
    prices_of,
    token_seconds,
)
from cluster.tools.choosing.cells import candidate_of
from cluster.tools.choosing.compare_plan import Asked, ComparePlan, asked_of
from cluster.tools.choosing.comparison import Candidate, Comparison
from cluster.tools.choosing.comparison_words import words_of
from cluster.tools.validate import validate


@dataclass(frozen=True, slots=True)
class _Engine:
    """One of the engines, with what its policy sees."""

    lane: Lane
    policy: RecordedPolicy

    async def observed(self, asked: Asked, concurrency: int) -> Observed:
        """One wave that is not counted, after a short one."""
        prompts = asked.prompts[:concurrency]
        short = replace(asked.plan, max_tokens=WARM_UP_TOKENS)
        await self.lane.run(short.wave(prompts, first=0, salt=f"{concurrency}-short"))
        self.policy.record(recording=True)
        wave = await self.lane.run(asked.plan.wave(prompts, first=0, salt=f"{concurrency}-seen"))
        self.policy.record(recording=False)
        return Observed(tuple(self.policy.records), wave.seconds)


async def compare_drafts(plan: ComparePlan, *, report: Report) -> Comparison:
    """Check, measure and foresee. Raises ConfigurationError."""
    asked = asked_of(plan)
    config = target_config(asked.plan, asked.prompts)
    checked = [await _checked(plan, config, draft, report) for draft in dict.fromkeys(plan.drafts)]
    fitting = [each for each in checked if not each.problems]
    measured: dict[str, Candidate] = {}
    if fitting:
        async with open_lab(config) as lab, AsyncExitStack() as stack:
            table = await lab.cost_table(Variant(plan.dtype, num_speculative_tokens=plan.most))
            engines = await _engines(plan, lab, fitting, stack)
            measured = await _measured(plan, asked, fitting, engines, table, report)
    candidates = tuple(measured.get(each.draft, each) for each in checked)
    comparison = Comparison(plan.target, plan.temperature, plan.max_tokens, candidates)
    return replace(comparison, words=words_of(comparison))


async def _checked(
    plan: ComparePlan, config: TargetConfig, draft: str, report: Report
) -> Candidate:
    """Whether a draft fits, and what it takes."""
    variant = Variant(plan.dtype, draft, plan.most)
    try:
        verdict = await validate(config, variant, report=report, sample=False)
    except ConfigurationError as error:
        return Candidate(draft, problems=(str(error),))
    memory = sum(need.num_bytes for need in verdict.needs if need.what.startswith("draft"))
    problems = [f"{each.what}: {each.detail}" for each in verdict.findings if not each.fits]
    return Candidate(draft, memory_bytes=memory, problems=tuple(problems))


async def _engines(
    plan: ComparePlan, lab: Lab, fitting: Iterable[Candidate], stack: AsyncExitStack
) -> dict[Variant, _Engine]:
    """All that are compared, the one without drafts first."""
    drafting = [
        Variant(plan.dtype, each.draft, number)
        for each in fitting
        for number in plan.engine_plan.num_speculative_tokens
    ]
    engines = {}
    for variant in (Variant(plan.dtype), *drafting):
        policy = RecordedPolicy(variant.num_speculative_tokens or 0)
        lane = await stack.enter_async_context(lab.lane(variant, policy=policy))
        engines[variant] = _Engine(lane, policy)
    return engines


async def _measured(
    plan: ComparePlan,
    asked: Asked,
    fitting: Sequence[Candidate],
    engines: Mapping[Variant, _Engine],
    table: CostTable,
    report: Report,
) -> dict[str, Candidate]:
    """Every draft that fits, with its cells."""
    seen = await _seen(plan, asked, fitting, engines, report)
    correct(table, list(chain.from_iterable(seen.values())))
    runs = {variant: engine.lane.run for variant, engine in engines.items()}
    rounds = {
        concurrency: await in_turn(
            asked.plan,
            runs,
            asked.prompts[: asked.plan.num_asked(concurrency)],
            concurrency,
            report,
        )
        for concurrency in asked.plan.concurrencies
    }
    off = Variant(plan.dtype)
    return {
        each.draft: candidate_of(
            plan,
            asked,
            each,
            rounds,
            prices_of(table, seen[off], seen[Variant(plan.dtype, each.draft, plan.most)]),
            draft_token_seconds=token_seconds(seen[Variant(plan.dtype, each.draft, plan.most)]),
        )
        for each in fitting
    }


async def _seen(
    plan: ComparePlan,
    asked: Asked,
    fitting: Sequence[Candidate],
    engines: Mapping[Variant, _Engine],
    report: Report,
) -> dict[Variant, list[Observed]]:
    """Waves that are not counted: without drafts, and of every draft with the largest K."""
    variants = [Variant(plan.dtype)]
    variants += [Variant(plan.dtype, each.draft, plan.most) for each in fitting]
    concurrencies = asked.plan.concurrencies
    ends = list(dict.fromkeys((concurrencies[0], concurrencies[-1])))
    seen: dict[Variant, list[Observed]] = {variant: [] for variant in variants}
    for count, concurrency in enumerate(ends):
        for place, variant in enumerate(variants):
            report("costs", count * len(variants) + place, len(ends) * len(variants))
            seen[variant].append(await engines[variant].observed(asked, concurrency))
    report("costs", len(ends) * len(variants), len(ends) * len(variants))
    return seen
