"""Everything that crosses a process, one small frozen record per hop.

engine -> target      StepInput      target -> engine      StepOutput
engine -> drafter     ExchangeInput  drafter -> engine     ExchangeOutput
gateway -> engine     Request        engine -> gateway     OutputBatch of TokenDelta
"""

from dataclasses import dataclass

from cluster.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How every sampled row of one sequence is processed; target and drafters share it.

    `suppressed_token_ids` cannot be drawn at absolute positions before `suppressed_before`
    (this is how min_tokens keeps EOS and the stop ids away).
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    suppressed_token_ids: tuple[int, ...] = ()
    suppressed_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows one sequence brings to a step.

    Row i sits at absolute position `start + i` and holds `token_ids[i]`; the last `num_drafts`
    rows are drafts. The last `num_drafts + 1` rows are sampled, unless `sampling` is None: then
    this is a prompt chunk that is not the last, and nothing comes back for it.
    """

    seq_id: int
    block_table: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    sampling: SamplingSpec | None = None
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass over the rows of several sequences, ragged."""

    step_id: int
    sequences: tuple[SequenceRows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTokens:
    """The target's own tokens for one sequence: accepted drafts, then the next token.

    `len(token_ids) == num_accepted + 1`. `logprobs`, when asked for, are natural logs of the
    target's unprocessed probabilities of those tokens; otherwise empty.
    """

    seq_id: int
    num_accepted: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry per sequence that was sampled, in the order of the input."""

    step_id: int
    sequences: tuple[SequenceTokens, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Token ids proposed to follow a sequence's committed tokens; empty is a draft too."""

    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Resync:
    """The draft worker does not hold the base it was told of: send the whole context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWanted:
    """One sequence's part of an exchange.

    The worker should hold `base_length` committed tokens; `new_token_ids` follow them. With
    `base_length` 0 the whole context is in the message, whatever the worker held.
    """

    seq_id: int
    base_length: int
    new_token_ids: tuple[int, ...]
    num_wanted: int
    sampling: SamplingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeInput:
    """Everything one engine tells one draft worker in a step."""

    engine_id: str
    step_id: int
    wanted: tuple[DraftWanted, ...]
    finished: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExchangeOutput:
    """One answer per wanted sequence, by sequence id."""

    step_id: int
    drafts: dict[int, Draft | Resync]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What one step brought to one request.

    `num_drafted` drafts were verified, `num_accepted` of them are among `token_ids` (a stop
    inside the accepted run cuts both). The last delta of a request has a `finish_reason`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an engine serves. `variant_operations` is empty when its results are bit-exact."""

    name: str
    max_model_len: int
    vocab_size: int
    drafters: tuple[str, ...]
    variant_operations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is; rides on every output batch."""

    running: int
    waiting: int
    free_blocks: int
    step_id: int


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """One item of the stream from an engine to a gateway; empty `deltas` is a heartbeat."""

    engine_id: str
    deltas: tuple[TokenDelta, ...]
    load: EngineLoad
