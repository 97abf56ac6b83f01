"""Goodput over time: what came in each bucket of seconds, and for how long that was too little."""

from collections.abc import Sequence
from itertools import pairwise

BUCKET = 0.25
WORST_SECONDS = 2.0  # that a fault of a draft may cost
LEAST = 0.9  # of the goodput without drafts

Emissions = Sequence[tuple[float, int]]  # when, counted from 0, and how many tokens


def rates(emitted: Emissions, *, seconds: float) -> list[float]:
    """Tokens a second in each bucket; tokens are spread over the time since those before them."""
    tokens = [0.0] * int(seconds / BUCKET)
    for (begin, _), (end, num_tokens) in pairwise([(0.0, 0), *emitted]):
        for place in range(int(begin / BUCKET), min(int(end / BUCKET) + 1, len(tokens))):
            overlap = min(end, (place + 1) * BUCKET) - max(begin, place * BUCKET)
            part = max(overlap, 0.0) / (end - begin) if end > begin else 1.0
            tokens[place] += num_tokens * part
    return [count / BUCKET for count in tokens]


def longest_below(values: Sequence[float], least: float) -> float:
    """Seconds of the longest run of buckets under `least`."""
    longest = run = 0
    for value in values:
        run = run + 1 if value < least else 0
        longest = max(longest, run)
    return longest * BUCKET


def poorest(values: Sequence[float], *, seconds: float) -> float:
    """The mean of the poorest stretch of so many seconds."""
    size = int(seconds / BUCKET)
    return min(sum(values[at : at + size]) for at in range(len(values) - size + 1)) / size


def longest_gap(emitted: Emissions, *, begin: float, end: float) -> float:
    """The longest time without a token from `begin` to `end`."""
    inside = [when for when, num_tokens in emitted if num_tokens and begin < when < end]
    return max(after - before for before, after in pairwise([begin, *inside, end]))
