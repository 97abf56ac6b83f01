"""The figures of `bench engine`, as a table and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from cluster.tools.bench.figures import Rounds, Spent, median_ratio, milliseconds
from cluster.tools.bench.lanes import Variant

FIRST_TOKEN = (50, 95)
INTER_TOKEN = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one concurrency, with what it is compared to.

    All of them are of the same concurrency, measured in turn with this one: `off` is the engine
    without drafts in the same number format, `float32` the engine with the same drafts in
    float32, `transformers` its generate in float32.
    """

    concurrency: int
    variant: Variant
    rounds: Rounds
    off: Rounds | None
    float32: Rounds | None
    transformers: Rounds | None

    @property
    def ratio_to_off(self) -> float | None:
        """Tokens per second over those without drafts."""
        return self._ratio_to(self.off)

    @property
    def ratio_to_float32(self) -> float | None:
        """Tokens per second over those of the same drafts in float32."""
        return self._ratio_to(self.float32)

    @property
    def ratio_to_transformers(self) -> float | None:
        """Tokens per second over those of transformers' generate, prompts included in both."""
        return self._ratio_to(self.transformers)

    @property
    def decode_ratio_to_transformers(self) -> float | None:
        """The same from when every request of a wave has its first token on."""
        others = () if self.transformers is None else self.transformers.decode_rates
        return _ratio(self.rounds.decode_rates, others)

    @property
    def same_tokens(self) -> bool | None:
        """Whether the answers are those without drafts."""
        return None if self.off is None else self.rounds.answers == self.off.answers

    def _ratio_to(self, others: Rounds | None) -> float | None:
        return _ratio(self.rounds.rates, () if others is None else others.rates)

    def as_json(self) -> dict[str, object]:
        """Plain data; times in seconds, ratios above 1 are faster."""
        spent = self.rounds.spent
        return {
            "concurrency": self.concurrency,
            "dtype": self.variant.dtype,
            "draft": self.variant.draft,
            "num_speculative_tokens": self.variant.num_speculative_tokens,
            "num_requests": len(self.rounds.streams),
            "tokens_per_second": self.rounds.rate,
            "decode_tokens_per_second": self.rounds.decode_rate,
            "first_token_seconds": self.rounds.first_token_seconds(*FIRST_TOKEN),
            "inter_token_seconds": self.rounds.inter_token_seconds(*INTER_TOKEN),
            "acceptance_length": self.rounds.acceptance_length,
            "draft_acceptance_rate": self.rounds.acceptance_rate,
            "step": None if spent is None else spent.as_json(),
            "ratio_to_off": self.ratio_to_off,
            "ratio_to_float32": self.ratio_to_float32,
            "ratio_to_transformers": self.ratio_to_transformers,
            "decode_ratio_to_transformers": self.decode_ratio_to_transformers,
            "same_tokens_as_off": self.same_tokens,
        }


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Every row of a run, and what was asked in it."""

    workload: str
    max_tokens: int
    temperature: float
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "workload": self.workload,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "rows": [row.as_json() for row in self.rows],
        }

    def __rich__(self) -> Group:
        title = f"{self.workload}, at most {self.max_tokens} tokens, T={self.temperature:g}"
        return Group(
            _table(f"Tokens per second: {title}", RATE_COLUMNS, self.rows),
            _table("Milliseconds, p50/p95 and p50/p95/p99", LATENCY_COLUMNS, self.rows),
        )


Columns = dict[str, Callable[[Row], str]]


def _ratio(own: Sequence[float], others: Sequence[float]) -> float | None:
    """The median of the rounds' ratios; None without anything to compare with."""
    return median_ratio(own, others) if others and all(others) else None


def _table(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "drafts" else "right")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table


def _drafts(row: Row) -> str:
    draft, number = row.variant.draft, row.variant.num_speculative_tokens
    return draft if number is None else f"{draft} K={number}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _part(part: str) -> Callable[[Row], str]:
    """One part of the mean step, in milliseconds."""

    def show(row: Row) -> str:
        spent: Spent | None = row.rounds.spent
        if spent is None:
            return "-"
        return f"{getattr(spent, part) / max(spent.num_steps, 1) * 1000:.1f}"

    return show


KEY_COLUMNS: Columns = {
    "at once": lambda row: str(row.concurrency),
    "weights": lambda row: row.variant.dtype,
    "drafts": _drafts,
}
RATE_COLUMNS: Columns = KEY_COLUMNS | {
    "tokens/s": lambda row: f"{row.rounds.rate:.1f}",
    "decode only": lambda row: f"{row.rounds.decode_rate:.1f}",
    "to off": lambda row: _times(row.ratio_to_off),
    "to float32": lambda row: _times(row.ratio_to_float32),
    "to transformers": lambda row: _times(row.ratio_to_transformers),
    "tokens a step": lambda row: f"{row.rounds.acceptance_length:.2f}",
    "drafts kept": lambda row: _percent(row.rounds.acceptance_rate),
    "same tokens": lambda row: {None: "-", True: "yes", False: "no"}[row.same_tokens],
}
LATENCY_COLUMNS: Columns = KEY_COLUMNS | {
    "first token": lambda row: milliseconds(row.rounds.first_token_seconds(*FIRST_TOKEN)),
    "between tokens": lambda row: milliseconds(row.rounds.inter_token_seconds(*INTER_TOKEN)),
    "step": _part("seconds"),
    "draft": _part("draft"),
    "forward": _part("forward"),
    "sample": _part("sample"),
    "rest": _part("rest"),
}


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"
