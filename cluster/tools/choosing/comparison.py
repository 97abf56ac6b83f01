"""What a comparison of drafts found, and which of them to take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Group
from rich.table import Table

from cluster.tools.bench.figures import Rounds, median_ratio
from cluster.tools.choosing.drafted import Steps, together
from cluster.tools.choosing.prediction import Expected

MILLI = 1000
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One draft with one K at one concurrency, beside no drafts measured in turn with it.

    `predicted` is the speed-up that was foreseen from answers' first tokens on. `wasted_seconds`
    of a step went to rows that were thrown away, by the cost table.
    """

    concurrency: int
    num_speculative_tokens: int
    rounds: Rounds
    off: Rounds
    predicted: float
    wasted_seconds: float

    @property
    def measured(self) -> float | None:
        """How much faster answers came, from their first tokens on."""
        return _ratio(self.rounds.decode_rates, self.off.decode_rates)

    @property
    def measured_with_prompts(self) -> float | None:
        """The same of whole requests."""
        return _ratio(self.rounds.rates, self.off.rates)

    @property
    def error(self) -> float | None:
        """How far the prediction is from what was measured, as a part of that."""
        return None if self.measured is None else self.predicted / self.measured - 1

    @property
    def same_tokens(self) -> bool:
        """Whether the answers are those without drafts."""
        return self.rounds.answers == self.off.answers

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Of the mean step, in all and waiting for drafts."""
        spent = self.rounds.spent
        assert spent is not None, "an engine's steps are timed"
        return spent.seconds / max(spent.num_steps, 1), spent.draft / max(spent.num_steps, 1)

    def as_json(self) -> dict[str, object]:
        """Plain data; times in seconds, ratios above 1 are faster."""
        step, waiting = self.step_seconds
        return {
            "concurrency": self.concurrency,
            "num_speculative_tokens": self.num_speculative_tokens,
            "tokens_per_second": self.rounds.rate,
            "off_tokens_per_second": self.off.rate,
            "acceptance_length": self.rounds.acceptance_length,
            "draft_acceptance_rate": self.rounds.acceptance_rate,
            "predicted_speedup": self.predicted,
            "measured_speedup": self.measured,
            "measured_speedup_with_prompts": self.measured_with_prompts,
            "prediction_error": self.error,
            "step_seconds": step,
            "draft_wait_seconds": waiting,
            "wasted_seconds": self.wasted_seconds,
            "same_tokens": self.same_tokens,
        }


@dataclass(frozen=True)
class Candidate:
    """One draft: what became of its tokens by category, what it takes, and what it brought.

    One that does not fit the target or the machine says why, and was not measured.
    """

    draft: str
    memory_bytes: int = 0
    problems: tuple[str, ...] = ()
    kinds: Mapping[str, Steps] | None = None
    draft_token_seconds: float = 0.0
    cells: tuple[Cell, ...] = ()
    expected: tuple[Expected, ...] = ()

    @cached_property
    def steps(self) -> Steps:
        """Of all categories."""
        return together((self.kinds or {}).values())

    @property
    def concurrencies(self) -> list[int]:
        """At which it was measured."""
        return list(dict.fromkeys(cell.concurrency for cell in self.cells))

    def best(self, concurrency: int) -> Cell:
        """The K that was fastest there."""
        cells = [cell for cell in self.cells if cell.concurrency == concurrency]
        return max(cells, key=lambda cell: cell.measured or 0.0)

    @property
    def stops_at(self) -> int | None:
        """The first concurrency from which on no K that was measured pays; None if there is none.

        It may pay again with more at once: that would be noise.
        """
        losing = [at for at in self.concurrencies if (self.best(at).measured or 0.0) <= 1]
        return losing[0] if losing else None

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "draft": self.draft,
            "fits": not self.problems,
            "problems": list(self.problems),
            "memory_bytes": self.memory_bytes,
            "draft_token_seconds": self.draft_token_seconds,
            "all": self.steps.as_json(),
            "categories": {name: each.as_json() for name, each in (self.kinds or {}).items()},
            "measured": [cell.as_json() for cell in self.cells],
            "expected_under_control": [
                {
                    "concurrency": each.num_sequences,
                    "depth": each.depth,
                    "speedup": each.speedup,
                }
                for each in self.expected
            ],
            "stops_paying_at": self.stops_at,
        }


@dataclass(frozen=True)
class Comparison:
    """Every draft of a run, and what is to be said of them."""

    target: str
    temperature: float
    max_tokens: int
    candidates: tuple[Candidate, ...]
    words: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[Candidate, ...]:
        """Those that fit."""
        return tuple(each for each in self.candidates if each.cells)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "target": self.target,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "candidates": [each.as_json() for each in self.candidates],
            "words": list(self.words),
        }

    def __rich__(self) -> Group:
        return Group(
            _table("Drafts that are kept, by category", *kept_rows(self)),
            _table("Speed-up to no drafts", *speed_rows(self)),
            *self.words,
        )


Rows = tuple[Sequence[str], list[Sequence[str]]]  # headings, and texts under them


def kept_rows(comparison: Comparison) -> Rows:
    """Acceptance by draft and category."""
    longest = max((len(each.steps.survival) for each in comparison.measured), default=0)
    positions = [f"up to {position}" for position in range(1, longest + 1)]
    rows: list[Sequence[str]] = []
    for candidate in comparison.measured:
        for name, steps in {"all": candidate.steps, **(candidate.kinds or {})}.items():
            kept = [f"{chance:.0%}" for chance in steps.survival]
            rows.append(
                (
                    candidate.draft,
                    name,
                    f"{steps.acceptance_length:.2f}",
                    percent(steps.acceptance_rate),
                    f"{steps.coverage:.0%}",
                    *kept,
                    *["-"] * (longest - len(kept)),
                )
            )
    return ("draft", "category", "tokens a step", "kept", "drafted at", *positions), rows


def speed_rows(comparison: Comparison) -> Rows:
    """What every draft was predicted to bring, and brought."""
    headings = (
        "draft",
        "K",
        "at once",
        "tokens a step",
        "predicted",
        "measured",
        "error",
        "with prompts",
        "step ms",
        "draft ms",
        "wasted ms",
        "ms a draft token",
        "MiB",
        "same tokens",
    )
    return headings, [
        (
            candidate.draft,
            str(cell.num_speculative_tokens),
            str(cell.concurrency),
            f"{cell.rounds.acceptance_length:.2f}",
            f"{cell.predicted:.2f}x",
            times(cell.measured),
            "-" if cell.error is None else f"{cell.error:+.0%}",
            times(cell.measured_with_prompts),
            *(f"{seconds * MILLI:.1f}" for seconds in (*cell.step_seconds, cell.wasted_seconds)),
            f"{candidate.draft_token_seconds * MILLI:.2f}",
            f"{candidate.memory_bytes / MIB:,.0f}",
            "yes" if cell.same_tokens else "no",
        )
        for candidate in comparison.measured
        for cell in candidate.cells
    ]


def percent(part: float | None) -> str:
    """A part of something, or nothing."""
    return "-" if part is None else f"{part:.0%}"


def times(ratio: float | None) -> str:
    """A ratio, or nothing."""
    return "-" if ratio is None else f"{ratio:.2f}x"


TEXTS = {"draft", "category"}


def _table(title: str, headings: Sequence[str], rows: list[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in TEXTS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _ratio(own: Sequence[float], others: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None where answers had no second token."""
    return median_ratio(own, others) if all((*own, *others)) else None
