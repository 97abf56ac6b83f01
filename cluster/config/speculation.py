"""The section `speculation`."""

from typing import Literal

from pydantic import Field

from cluster.config.base import Config
from cluster.errors import ConfigurationError


class SpeculationConfig(Config):
    """How far to guess, how long to wait for a guess, and how it is verified.

    Both rules keep the target's distribution. Under `coupled` a request's seed alone decides its
    tokens, whatever is drafted. Under `ratio` the tokens of a seed depend on what was drafted and
    when: the same request may be answered otherwise with another drafter or K, after a draft came
    late, or on another engine. More drafts of a model may be kept where few tokens are likely,
    fewer where many are: a drafter sends the most probable ones only. At temperature 0 the two
    rules are one.

    `num_speculative_tokens` is the most that is drafted for a sequence in a step. Under the policy
    `adaptive` it is a cap, and how far is guessed is decided for every sequence at every step, from
    what a step costs and which drafts are kept; 8 is where the gain of going further is small.
    Under `fixed` it is the number. With `profile` the target's steps are timed when it is first
    started on a machine, which takes some seconds, and is kept.
    """

    policy: Literal["adaptive", "fixed"] = "adaptive"
    num_speculative_tokens: int = Field(default=8, ge=0, le=64)
    profile: bool = True
    verification: Literal["coupled", "ratio"] = "coupled"
    draft_deadline_seconds: float = Field(default=1.0, gt=0)


def speculation_from_flag(value: str) -> dict[str, str | int]:
    """What `--num-speculative-tokens K|auto` means: always K, or as many as pay.

    Raises ConfigurationError.
    """
    if value == "auto":
        return {"policy": "adaptive"}
    if not value.isdecimal():
        raise ConfigurationError(f"--num-speculative-tokens: {value!r} is no number and not auto")
    return {"policy": "fixed", "num_speculative_tokens": int(value)}
