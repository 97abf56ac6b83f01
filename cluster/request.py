"""What a user asked for: plain, frozen, complete. Defaults are those of the wire."""

from dataclasses import dataclass, field
from enum import StrEnum

ANSWERS = int.from_bytes(b"answers")  # sets the seeds of further answers apart
DEADLINE_PASSED = "the deadline has passed"  # the error of what is aborted for that


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # cancelled, or its deadline passed
    ERROR = "error"  # the engine could not go on; another one can
    FAILED = "failed"  # this sequence alone cannot go on, here or anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the target's distribution.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off.
    The seed, with the position, decides every draw. The defaults of the rest change nothing.

    `repetition_penalty` counts tokens of prompt and answer, the other two those of the answer.
    `logit_bias` is (token id, what is added to its logit). A banned sequence's last token cannot
    be drawn where the tokens before it stand.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    banned_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # of two tokens or more


class GrammarKind(StrEnum):
    """What a grammar's source is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text of an answer has to match."""

    kind: GrammarKind
    source: str


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
    grammar: Grammar | None = None
    logprobs: bool = False
    top_logprobs: int = 0  # the most probable tokens at every emitted position
    prompt_logprobs: bool = False  # of every prompt token but the first
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0  # higher goes first
    tenant: str = ""  # whose request it is; within a priority tenants share by weight
    weight: float = 1.0  # the tenant's share, against that of others who wait
    deadline_seconds: float | None = None  # from its submission; later it is not worth a token
    trace_ratio: float = 0.0  # of its steps that are told of beside its tokens
    cache_salt: str = ""  # settled prefixes are shared between requests of one salt only


def answer_seed(seed: int, index: int) -> int:
    """The seed of one of several answers to a request: `index` 0 has the request's own.

    The others have the outputs of SplitMix64 (Steele, Lea and Flood, 2014), started apart from
    where the noise of sampling is drawn. Those of different indices differ.
    """
    if index == 0:
        return seed
    word = ((seed ^ ANSWERS) + index * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)
