"""What a drafter brings, from a short sample: a few prompts of every built-in workload."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from rich.table import Table

from cluster.tools.bench.engine import EnginePlan, bench_engine
from cluster.tools.bench.figures import Rounds, Wave
from cluster.tools.bench.lanes import Variant
from cluster.tools.bench.progress import Report
from cluster.tools.bench.workloads import BUILT_IN, Workload, parse_workload

PROMPTS = 2  # of each workload
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Part:
    """What the prompts of one workload showed; a ratio above 1 is faster than without drafts."""

    workload: str
    acceptance_length: float
    draft_acceptance_rate: float | None
    ratio_to_off: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """All parts, the last being of all prompts, and seconds of the mean step.

    `step_seconds` is with drafts, its wait for the drafter included.
    """

    parts: tuple[Part, ...]
    off_step_seconds: float
    step_seconds: float
    draft_wait_seconds: float

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)

    def __rich__(self) -> Table:
        title = (
            f"One at a time: a step takes {self.step_seconds * 1000:.1f} ms with drafts, "
            f"{self.draft_wait_seconds * 1000:.1f} ms of them waiting for the drafter, "
            f"and {self.off_step_seconds * 1000:.1f} ms without"
        )
        table = Table(title=title, title_justify="left")
        for heading in ("prompts", "tokens a step", "drafts kept", "to off"):
            table.add_column(heading, justify="left" if heading == "prompts" else "right")
        for part in self.parts:
            rate = part.draft_acceptance_rate
            table.add_row(
                part.workload,
                f"{part.acceptance_length:.2f}",
                "-" if rate is None else f"{rate:.0%}",
                f"{part.ratio_to_off:.2f}x",
            )
        return table


async def expect(target: str, variant: Variant, *, report: Report) -> Expectation:
    """Answer the sample with drafts and without, in turn, one prompt at a time."""
    kinds = [kind for _ in range(PROMPTS) for kind in BUILT_IN]
    prompts = chain.from_iterable(
        zip(*(parse_workload(kind).prompts[:PROMPTS] for kind in BUILT_IN), strict=True)
    )
    plan = EnginePlan(
        target=target,
        workload=Workload("sample", tuple(prompts)),
        drafts=(variant.draft,),
        num_speculative_tokens=(variant.num_speculative_tokens or 0,),
        dtypes=(variant.dtype,),
        num_prompts=len(kinds),
        max_tokens=MAX_TOKENS,
        rounds=1,
    )
    off, on = (row.rounds for row in (await bench_engine(plan, report=report)).rows)
    return Expectation(
        tuple(_parts(kinds, on.waves, off.waves)),
        off_step_seconds=_step_seconds(off)[0],
        step_seconds=_step_seconds(on)[0],
        draft_wait_seconds=_step_seconds(on)[1],
    )


def _parts(kinds: Sequence[str], on: Sequence[Wave], off: Sequence[Wave]) -> Iterable[Part]:
    """One of each workload's waves, then one of all."""
    for name in (*BUILT_IN, "all"):
        places = [place for place, kind in enumerate(kinds) if name in (kind, "all")]
        own, others = (Rounds((tuple(waves[place] for place in places),)) for waves in (on, off))
        yield Part(name, own.acceptance_length, own.acceptance_rate, own.rate / others.rate)


def _step_seconds(rounds: Rounds) -> tuple[float, float]:
    """Seconds of the mean step, in all and waiting for the drafter."""
    assert rounds.spent is not None, "an engine's steps are timed"
    num_steps = max(rounds.spent.num_steps, 1)
    return rounds.spent.seconds / num_steps, rounds.spent.draft / num_steps
