"""Everything that crosses a process, one small frozen record per hop.

engine -> target      StepInput      target -> engine      StepOutput
engine -> drafter     ExchangeInput  drafter -> engine     ExchangeOutput
gateway -> engine     Request        engine -> gateway     OutputBatch of TokenDelta
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from cluster.request import FinishReason, Grammar

TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How every sampled row of one sequence is processed; target and drafters share it.

    `suppressed_token_ids` cannot be drawn at absolute positions before `suppressed_before`
    (this is how min_tokens keeps EOS and the stop ids away). The other fields are those of
    `request.SamplingParams`; the answer begins at position `num_prompt_tokens`.
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
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    suppressed_token_ids: tuple[int, ...] = ()
    suppressed_before: int = 0
    num_prompt_tokens: int = 0

    @property
    def needs_history(self) -> bool:
        """Whether a row's distribution depends on the tokens before it beyond the logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.banned_sequences
        )


class Rule(StrEnum):
    """How drafts are verified; see `sampling.verify`."""

    COUPLED = "coupled"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The distribution a draft token was drawn from: ids, and probabilities that sum to 1."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` slots of one KV block to another, in all layers."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows one sequence brings to a step.

    Row i sits at absolute position `start + i` and holds `token_ids[i]`; the last `num_drafts`
    rows are drafts. The last `num_drafts + 1` rows are sampled, unless `sampling` is None: then
    this is a prompt chunk that is not the last, and nothing but scores comes back for it.

    `history_token_ids` are the tokens at positions before `start`; they are only there when
    `sampling.needs_history` or a grammar asks for them. `scored_token_ids`, when not empty, has
    the token whose logprob is asked for each of the first rows. `draft_distributions` has one
    entry per draft under Rule.RATIO, and none where a draft was certain (one-hot).
    """

    seq_id: int
    block_table: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    sampling: SamplingSpec | None = None
    grammar: Grammar | None = None
    history_token_ids: tuple[int, ...] = ()
    draft_distributions: tuple[DraftDistribution, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    scored_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass over the rows of several sequences, ragged, after the copies."""

    step_id: int
    sequences: tuple[SequenceRows, ...]
    copies: tuple[BlockCopy, ...] = ()
    rule: Rule = Rule.COUPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTokens:
    """The target's own tokens for one sequence: accepted drafts, then the next token.

    `len(token_ids) == num_accepted + 1`, or 0 for a prompt chunk that was only scored. `logprobs`,
    when asked for, are natural logs of the target's unprocessed probabilities of those tokens;
    otherwise empty. `top_logprobs` has for each token the (id, logprob) of the most probable ones,
    best first. `scores` are the logprobs of `scored_token_ids`. With an `error` the sequence
    cannot go on, and has no tokens: its request ends with FinishReason.FAILED.
    """

    seq_id: int
    num_accepted: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    scores: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry per sequence that was sampled or scored, in the order of the input."""

    step_id: int
    sequences: tuple[SequenceTokens, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Token ids proposed to follow a sequence's committed tokens; empty is a draft too.

    `distributions` has one entry per token where they were drawn under Rule.RATIO; a drafter that
    is certain of its tokens (one-hot) gives none. `margins` has what `drafter` knew of each token's
    chances before drawing it (the lead of the likeliest logit, the length of a match), or nothing.
    `version` is that of the weights it was drawn with.
    """

    token_ids: tuple[int, ...] = ()
    distributions: tuple[DraftDistribution, ...] = ()
    margins: tuple[float, ...] = ()
    drafter: str = ""
    version: int = 0

    def first(self, num_tokens: int) -> "Draft":
        """Its first tokens, with all that belongs to them."""
        if num_tokens >= len(self.token_ids):
            return self
        return Draft(
            self.token_ids[:num_tokens],
            self.distributions[:num_tokens],
            self.margins[:num_tokens],
            self.drafter,
            self.version,
        )


NO_DRAFT = Draft()


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
    """Everything one engine tells one draft worker in a step.

    After `budget_seconds` the worker starts on no more tokens and answers with what there is.
    """

    engine_id: str
    step_id: int
    wanted: tuple[DraftWanted, ...]
    finished: tuple[int, ...] = ()
    rule: Rule = Rule.COUPLED
    price: float = 0.0  # the survival below which a draft position does not pay
    budget_seconds: float = inf


@dataclass(frozen=True, slots=True)
class ExchangeOutput:
    """One answer per wanted sequence, by sequence id."""

    step_id: int
    drafts: dict[int, Draft | Resync]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step as one request saw it, for a trace.

    `ended_at` is in seconds since 1970. Before the step the request waited `wait_seconds` since its
    step before, or since it arrived; then `draft_seconds` for drafts, then `verify_seconds` for the
    target. `num_asked` drafts were asked for, `num_drafted` verified; `reason` says why so many.
    """

    step_id: int
    ended_at: float
    wait_seconds: float
    draft_seconds: float
    verify_seconds: float
    num_sequences: int
    num_asked: int
    num_drafted: int
    num_accepted: int
    drafter: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What a number of steps, mostly one, brought to one request.

    `num_drafted` drafts were verified, `num_accepted` of them are among `token_ids` (a stop
    inside the accepted run cuts both). `prompt_logprobs`, of all prompt tokens but the first,
    and `num_cached_tokens`, the prompt tokens that were not computed because an earlier request's
    were at hand, come with the first token. The last delta has a `finish_reason`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    num_cached_tokens: int = 0
    num_steps: int = 1
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    traced_steps: tuple[TracedStep, ...] = ()  # those of its steps that were sampled for a trace
    # When its tokens were, by the engine's wall clock.
    emitted_at: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What an engine serves. `variant_operations` is empty when its results are bit-exact.

    The seed alone decides an answer only where `verification` is Rule.COUPLED.
    """

    name: str
    max_model_len: int
    vocab_size: int
    drafters: tuple[str, ...]
    verification: str = Rule.COUPLED
    variant_operations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is, and how fast; rides on every output batch.

    A step of n rows is seen to last `base_seconds + n * row_seconds`, and to bring each sequence
    that decodes `tokens_per_step`; all are 0 until steps were seen. `prompt_tokens` are to be
    computed before those who hold them decode. `prefixes` are digests (see `prefixes`) of what
    the prefix cache holds, or None when that has not changed since it was last told.
    """

    running: int
    waiting: int
    free_blocks: int
    step_id: int
    num_blocks: int = 0
    max_num_seqs: int = 1
    max_num_waiting: int = 0
    max_prompt_rows: int = 1  # in a step that decodes, too
    max_num_batched_tokens: int = 1
    keys_per_row: int = 1024  # that cost as much to look at as a row does without any
    prompt_tokens: int = 0
    step_seconds: float = 0.0  # lately, drafting included
    base_seconds: float = 0.0
    row_seconds: float = 0.0
    tokens_per_step: float = 0.0
    tokens_per_second: float = 0.0  # of all sequences, lately
    answer_tokens: float = 0.0  # of an answer that ended, on average
    price: float = 0.0  # the survival below which a draft position does not pay
    price_floor: float = 0.0  # what the router asked for
    drafted_per_second: float = 0.0  # draft tokens verified, lately
    accepted_per_second: float = 0.0  # of these, kept
    late_ratio: float = 0.0  # of the steps that asked for drafts: those in which none came in time
    prefixes: frozenset[int] | None = None

    @property
    def capacity(self) -> float:
        """Tokens a second with all places taken; 0 while unknown."""
        seconds = self.base_seconds + self.max_num_seqs * self.row_seconds
        return self.max_num_seqs * self.tokens_per_step / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """What a draft pool is to draft with: a folder's weights, or, as version 0, those configured.

    `turn` counts the pool's changes of weights: of two, the higher one was decided later. `folder`
    is read on the node `node_id` if that is there. `previous` is what the pool goes back to should
    this turn out worse; None when it is not on trial.
    """

    version: int = 0
    turn: int = 0
    folder: str = ""
    node_id: str = ""
    previous: "DraftWeights | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionGrade:
    """Drafted positions that the target has decided on, and how many of them it kept.

    Of the latest ones drawn with one version of the weights. A position after a wrong one counts
    for nothing.
    """

    version: int
    num_verified: int
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoad:
    """How busy a draft worker is and what it serves with; rides on its registration.

    `version` is that of the weights it drafts with now, `weights` what it was last told to use.
    """

    num_sequences: int = 0
    busy_ratio: float = 0.0  # of about the last second
    version: int = 0
    grades: tuple[VersionGrade, ...] = ()
    weights: DraftWeights = DraftWeights()


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """One item of the stream from an engine to a gateway; empty `deltas` is a heartbeat."""

    engine_id: str
    deltas: tuple[TokenDelta, ...]
    load: EngineLoad
