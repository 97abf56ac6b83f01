"""Engines with and without drafts beside one another, and transformers' generate beside them.

Every variant answers the same prompts with the same seeds, wave by wave: `concurrency` requests
are started at once, and when the last has ended the next variant takes the same wave. So the
variants of one concurrency take turns of some seconds, the first turn going round, and whatever
slows the machine for longer slows all of them. A round is the whole workload once. Rates are
medians over the rounds, and a ratio is the median of the rounds' ratios.

Each wave has a cache salt of its own: nothing is found in the prefix cache.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

from cluster.config import DType, SpeculationConfig, TargetConfig
from cluster.errors import ConfigurationError
from cluster.models.load import load_spec
from cluster.models.reference import resolve
from cluster.request import Request, SamplingParams, StoppingParams
from cluster.text.tokenizer import load_tokenizer
from cluster.tools.bench.baseline import TransformersBaseline
from cluster.tools.bench.figures import Rounds, Wave
from cluster.tools.bench.lanes import OFF, Lab, Variant, open_lab
from cluster.tools.bench.progress import Report
from cluster.tools.bench.report import EngineReport, Row
from cluster.tools.bench.workloads import Workload

WARM_UP_TOKENS = 4
TRANSFORMERS = Variant("float32", "transformers")

Run = Callable[[Sequence[Request]], Awaitable[Wave]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What is compared: the product of `concurrencies`, `dtypes`, `drafts` and their K.

    The engine without a drafter is always among them, as what the others are compared with.
    """

    target: str
    workload: Workload
    concurrencies: Sequence[int] = (1,)
    drafts: Sequence[str] = (OFF, "ngram")
    num_speculative_tokens: Sequence[int] = (4,)
    dtypes: Sequence[DType] = ("float32",)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    transformers: bool = False
    num_prompts: int = 8
    max_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False
    rounds: int = 3

    @property
    def variants(self) -> list[Variant]:
        """By number format, the one without drafts first."""
        drafting = [draft for draft in dict.fromkeys(self.drafts) if draft != OFF]
        numbers = list(dict.fromkeys(self.num_speculative_tokens))
        return [
            variant
            for dtype in dict.fromkeys(self.dtypes)
            for variant in (
                Variant(dtype),
                *(Variant(dtype, *each) for each in product(drafting, numbers)),
            )
        ]

    def prompts(self) -> list[tuple[int, ...]]:
        """Enough for full waves of the largest concurrency. Raises ConfigurationError."""
        tokenizer = load_tokenizer(resolve(self.target))
        return self.workload.token_ids(tokenizer, max(map(self.num_asked, self.concurrencies)))

    def num_asked(self, concurrency: int) -> int:
        """Prompts of a round: `num_prompts` or more, in full waves."""
        return -(-self.num_prompts // concurrency) * concurrency

    def wave(self, prompts: Sequence[Sequence[int]], *, first: int, salt: str) -> list[Request]:
        """Requests of prompts from number `first` on; the number is the seed."""
        return [
            Request(
                request_id=f"{salt}-{number}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(seed=number, temperature=self.temperature),
                stopping=StoppingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos),
                cache_salt=salt,
            )
            for number, prompt in enumerate(prompts, start=first)
        ]


async def bench_engine(plan: EnginePlan, *, report: Report) -> EngineReport:
    """Measure every variant of the plan. Raises ConfigurationError."""
    prompts = plan.prompts()
    rows: list[Row] = []
    async with open_lab(target_config(plan, prompts)) as lab, AsyncExitStack() as stack:
        runs: dict[Variant, Run] = {}
        for variant in plan.variants:
            lane = await stack.enter_async_context(lab.lane(variant, plan.speculation))
            runs[variant] = lane.run
        if plan.transformers:
            runs[TRANSFORMERS] = await _transformers(lab)
        for concurrency in dict.fromkeys(plan.concurrencies):
            asked = prompts[: plan.num_asked(concurrency)]
            measured = await in_turn(plan, runs, asked, concurrency, report)
            rows += _rows(concurrency, measured)
    return EngineReport(plan.workload.name, plan.max_tokens, plan.temperature, tuple(rows))


def target_config(plan: EnginePlan, prompts: Sequence[Sequence[int]]) -> TargetConfig:
    """A target just large enough for the plan. Raises ConfigurationError naming the prompt."""
    room = plan.max_tokens + max(plan.num_speculative_tokens)
    longest = max(prompts, key=len)
    limit = load_spec(resolve(plan.target)).max_position_embeddings
    if len(longest) + room > limit:
        raise ConfigurationError(
            f"workload {plan.workload.name!r}: prompt {list(prompts).index(longest) + 1} has "
            f"{len(longest)} tokens, which with {room} new ones are over the model's {limit}"
        )
    return TargetConfig(
        model=plan.target,
        max_model_len=len(longest) + room,
        max_num_seqs=max(plan.concurrencies),
    )


async def _transformers(lab: Lab) -> Run:
    baseline = await lab.call(partial(TransformersBaseline, lab.folder))
    return lambda requests: lab.call(partial(baseline.run, requests))


async def in_turn(
    plan: EnginePlan,
    runs: Mapping[Variant, Run],
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    report: Report,
) -> dict[Variant, Rounds]:
    """Every variant's waves of the prompts, in turn, after a short one each that is not counted."""
    starts = range(0, len(prompts), concurrency)
    waves = list(product(range(plan.rounds), starts))
    what, total = f"{plan.workload.name}, {concurrency} at once", len(waves) * len(runs)
    report(what, 0, total)
    short = replace(plan, max_tokens=WARM_UP_TOKENS)
    for run in runs.values():
        await run(short.wave(prompts[:concurrency], first=0, salt=f"{concurrency}-warm-up"))
    variants = list(runs)
    rounds: dict[Variant, list[list[Wave]]] = {
        variant: [[] for _ in range(plan.rounds)] for variant in variants
    }
    for place, (number, start) in enumerate(waves):
        turn = place % len(variants)
        wave = plan.wave(
            prompts[start : start + concurrency], first=start, salt=f"{concurrency}-{number}"
        )
        for count, variant in enumerate(variants[turn:] + variants[:turn], start=1):
            rounds[variant][number].append(await runs[variant](wave))
            report(what, place * len(variants) + count, total)
    return {variant: Rounds(tuple(map(tuple, each))) for variant, each in rounds.items()}


def _rows(concurrency: int, measured: Mapping[Variant, Rounds]) -> list[Row]:
    """A row a variant, beside the one without drafts of its number format."""
    return [
        Row(
            concurrency=concurrency,
            variant=variant,
            rounds=rounds,
            off=measured.get(Variant(variant.dtype)),
            float32=measured.get(replace(variant, dtype="float32")),
            transformers=measured.get(TRANSFORMERS),
        )
        for variant, rounds in measured.items()
    ]
