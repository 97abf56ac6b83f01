"""From streams and clocks to the figures that are shown."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from cluster.tools.bench.streams import Stream

Percentiles = dict[str, float | None]  # by "p95"; None of nothing


def percentile(values: Sequence[float], rank: float) -> float:
    """The value below which `rank` percent lie, linear between neighbours. Needs a value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the seconds of a number of engine steps went.

    `draft` is the wait for the drafter, `forward` the target's forward pass with the head,
    `sample` drawing and verifying, `rest` everything else: scheduling, committing, the way to
    the target's thread and back, and whoever takes the tokens.
    """

    num_steps: int = 0
    draft: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    rest: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, each.name) + getattr(other, each.name) for each in PARTS))

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(*(getattr(self, each.name) - getattr(other, each.name) for each in PARTS))

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.draft + self.forward + self.sample + self.rest

    def as_json(self) -> dict[str, float]:
        """Seconds of the mean step, in all and by part."""
        num_steps = max(self.num_steps, 1)
        return {
            "num_steps": self.num_steps,
            "step_seconds": self.seconds / num_steps,
            "draft_wait_seconds": self.draft / num_steps,
            "target_forward_seconds": self.forward / num_steps,
            "target_sample_seconds": self.sample / num_steps,
            "engine_rest_seconds": self.rest / num_steps,
        }


PARTS = fields(Spent)


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that ran at once, the wall time to the last token, and where it went if known."""

    streams: tuple[Stream, ...]
    seconds: float
    spent: Spent | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def decode(self) -> tuple[int, float]:
        """Tokens and seconds from when every request had its first token on.

        Beside a batch that computes all prompts before any token this leaves the prompts out.
        """
        start = max(stream.arrivals[0].seconds for stream in self.streams)
        after = [
            arrival
            for stream in self.streams
            for arrival in stream.arrivals
            if arrival.seconds > start
        ]
        end = max((arrival.seconds for arrival in after), default=start)
        return sum(arrival.num_tokens for arrival in after), end - start

    @property
    def together(self) -> tuple[int, float]:
        """Tokens and seconds while all requests were under way: after the prompts, until one ends.

        Later ones are fewer than were asked for, the more so the more unlike their drafts are.
        """
        start = max(stream.arrivals[0].seconds for stream in self.streams)
        end = min(stream.arrivals[-1].seconds for stream in self.streams)
        num_tokens = sum(
            arrival.num_tokens
            for stream in self.streams
            for arrival in stream.arrivals
            if start < arrival.seconds <= end
        )
        return num_tokens, max(end - start, 0.0)


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one variant did, round by round: rates are the median of the rounds'.

    A round is the whole workload once, so a disturbance of the machine spoils one of them.
    """

    rounds: tuple[tuple[Wave, ...], ...]

    @property
    def waves(self) -> tuple[Wave, ...]:
        """Of all rounds, in order."""
        return tuple(wave for waves in self.rounds for wave in waves)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Of all rounds, in order."""
        return tuple(stream for wave in self.waves for stream in wave.streams)

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each round, prompts included."""
        return tuple(
            sum(wave.num_tokens for wave in waves) / sum(wave.seconds for wave in waves)
            for waves in self.rounds
        )

    @property
    def decode_rates(self) -> tuple[float, ...]:
        """Tokens per second of each round from when all of a wave had their first token on."""
        return tuple(_rate([wave.decode for wave in waves]) for waves in self.rounds)

    @property
    def goodput(self) -> float:
        """The median round's tokens per second while all of a wave were under way.

        With the prompts and to the last token, where they never were.
        """
        return statistics.median(
            _rate([wave.together for wave in waves]) or rate
            for waves, rate in zip(self.rounds, self.rates, strict=True)
        )

    @property
    def rate(self) -> float:
        """The median round's tokens per second, prompts included."""
        return statistics.median(self.rates)

    @property
    def decode_rate(self) -> float:
        """The median round's tokens per second without the prompts."""
        return statistics.median(self.decode_rates)

    @property
    def acceptance_length(self) -> float:
        """Tokens a sequence gained in a step, on average."""
        return self._num_tokens / max(sum(len(each.arrivals) for each in self.streams), 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        num_drafted = sum(stream.num_drafted for stream in self.streams)
        num_accepted = sum(stream.num_accepted for stream in self.streams)
        return num_accepted / num_drafted if num_drafted else None

    @property
    def spent(self) -> Spent | None:
        """Where the time of all rounds went, where that was measured."""
        parts = [wave.spent for wave in self.waves if wave.spent is not None]
        return sum(parts, Spent()) if parts else None

    @property
    def answers(self) -> list[list[int]]:
        """The token ids of the first round's answers."""
        return [stream.token_ids for wave in self.rounds[0] for stream in wave.streams]

    @property
    def _num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    def first_token_seconds(self, *ranks: float) -> Percentiles:
        """Percentiles of the time to the first token."""
        return percentiles([stream.first_token_seconds for stream in self.streams], ranks)

    def inter_token_seconds(self, *ranks: float) -> Percentiles:
        """Percentiles of the time between tokens."""
        times = [time for stream in self.streams for time in stream.inter_token_seconds()]
        return percentiles(times, ranks)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the rounds' ratios: both of a ratio were taken within the same minute or so."""
    return statistics.median(
        above / below for above, below in zip(numerators, denominators, strict=True)
    )


def _rate(parts: Iterable[tuple[int, float]]) -> float:
    """Tokens over seconds, each summed; 0 where nothing came after the first tokens."""
    tokens, seconds = (sum(values) for values in zip(*parts, strict=True))
    return tokens / seconds if seconds else 0.0


def percentiles(values: Sequence[float], ranks: Sequence[float]) -> Percentiles:
    """Several percentiles by name, each None of no values."""
    return {f"p{rank:g}": percentile(values, rank) if values else None for rank in ranks}


def milliseconds(values: Percentiles) -> str:
    """Percentiles for a table, in their order."""
    return "/".join("-" if value is None else f"{value * 1000:.0f}" for value in values.values())
