"""What a user asked for: plain, frozen, complete. Defaults are those of the wire."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # cancelled, or its deadline passed
    ERROR = "error"  # the engine could not go on with it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the target's distribution.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off.
    The seed, with the position, decides every draw.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When an answer ends. Stop strings are the gateway's: the engine knows no text."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # EOS and stop ids cannot be drawn before that many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """The caller's say over drafting; it never changes a token."""

    enabled: bool = True
    max_tokens: int | None = None  # cap on num_speculative_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue.

    `output_token_ids` are tokens an earlier engine already emitted for this request: the
    sequence goes on after them exactly as if it had never moved.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams = field(default_factory=StoppingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    logprobs: bool = False
    output_token_ids: tuple[int, ...] = ()
