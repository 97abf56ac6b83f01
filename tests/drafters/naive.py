"""What text says about its own continuation, by searching all of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence


def ends(text: Sequence[int], substring: Sequence[int]) -> list[int]:
    """Positions after all occurrences."""
    length = len(substring)
    return [end for end in range(length, len(text) + 1) if text[end - length : end] == substring]


def longest_repeated_suffix(text: list[int]) -> list[int]:
    """The longest suffix that also ends somewhere before the end."""
    for start in range(1, len(text)):
        if len(ends(text, text[start:])) > 1:
            return text[start:]
    return []


def longest_known_suffix(text: list[int], read: list[int]) -> list[int]:
    """The longest suffix of `read` that is in the text."""
    return next(read[start:] for start in range(len(read) + 1) if ends(text, read[start:]))


def weights_of_followers(
    text: list[int], context: list[int], half_life: float
) -> Mapping[int, float]:
    """What followed a context, an occurrence worth half after `half_life` tokens."""
    weights: dict[int, float] = defaultdict(float)
    for end in ends(text, context):
        if end < len(text):
            weights[text[end]] += 0.5 ** ((len(text) - end - 1) / half_life)
    return weights


def draft(text: list[int], num_wanted: int, half_life: float) -> tuple[int, ...]:
    """The heaviest follower of the longest match that has one, time after time."""
    match = longest_repeated_suffix(text)
    token_ids: list[int] = []
    while match and len(token_ids) < num_wanted:
        weights = weights_of_followers(text, match, half_life)
        if weights:
            token_ids.append(max(weights, key=weights.__getitem__))
            match = longest_known_suffix(text, [*match, token_ids[-1]])
        else:
            match = match[1:]
    return tuple(token_ids)
