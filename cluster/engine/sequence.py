"""One request as the engine knows it: its tokens, and how many the target has computed.

token_ids   [ prompt ............ | output ........ ]
            [ computed ........................ | x ]   x: uncomputed; one while decoding
"""

from collections.abc import Callable

from cluster.messages import SamplingSpec, TokenDelta
from cluster.request import FinishReason, Request

Emit = Callable[[TokenDelta], None]


class Sequence:
    """A request under way. Only a commit adds tokens and scores; everyone else reads.

    `seq_id` grows with arrival, so it is also the order of age. `arrived_at` and `deadline_at` are
    in seconds of the monotonic clock. The scheduler notes what the sequence has waited, in steps,
    and how many tokens of the prompt were cached when it was first admitted (None before).
    """

    def __init__(
        self,
        request: Request,
        *,
        seq_id: int,
        emit: Emit,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        arrived_at: float = 0.0,
    ) -> None:
        stopping = request.stopping
        eos = frozenset() if stopping.ignore_eos else eos_token_ids
        self.seq_id = seq_id
        self.request = request
        self.emit = emit
        self.stop_token_ids = eos | frozenset(stopping.stop_token_ids)
        self.sampling = _sampling_spec(request, self.stop_token_ids)
        self.max_model_len = max_model_len
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_computed_tokens = 0
        self.arrived_at = arrived_at
        deadline = request.deadline_seconds
        self.deadline_at = None if deadline is None else arrived_at + deadline
        self.stepped_at: float | None = None  # when its last step ended, if its steps are traced
        self.waits_since: int | None = None
        self.num_waited_steps = 0
        self.num_cached_tokens: int | None = None
        self.prompt_logprobs: list[float] = []  # of the prompt's second token and those after it

    @property
    def num_uncomputed_tokens(self) -> int:
        """Rows it takes to sample the next token."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def context_left(self) -> int:
        """Tokens the target's context still takes."""
        return self.max_model_len - len(self.token_ids)

    @property
    def max_tokens_left(self) -> int:
        """Tokens the request may still bring; the context bounds it if the request does not."""
        max_tokens = self.request.stopping.max_tokens
        if max_tokens is None:
            return self.context_left
        return len(self.request.prompt_token_ids) + max_tokens - len(self.token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether a token was added here; what an earlier engine emitted does not count."""
        num_given = len(self.request.prompt_token_ids) + len(self.request.output_token_ids)
        return len(self.token_ids) > num_given

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer so far, those of an earlier engine included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_scores_wanted(self) -> int:
        """Logprobs of the prompt that are asked for; an earlier engine has delivered them all."""
        if not self.request.prompt_logprobs or self.request.output_token_ids:
            return 0
        return len(self.request.prompt_token_ids) - 1

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that need not be computed: not the last one, and none to be scored."""
        if len(self.prompt_logprobs) < self.num_scores_wanted:
            return len(self.prompt_logprobs)
        return len(self.token_ids) - 1

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, or None if it goes on.

        The prompt's own last token ends nothing.
        """
        if len(self.token_ids) == len(self.request.prompt_token_ids):
            return None
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if self.max_tokens_left <= 0 or self.context_left <= 0:
            return FinishReason.LENGTH
        return None

    def add_scores(self, scores: tuple[float, ...]) -> None:
        """Take in logprobs of the tokens after the next uncomputed ones; known ones are skipped."""
        num_known = len(self.prompt_logprobs) - self.num_computed_tokens
        self.prompt_logprobs.extend(scores[num_known:])

    def extend(self, token_ids: tuple[int, ...]) -> int:
        """Add tokens in order until one of them ends the sequence; how many were added."""
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if self.finish_reason() is not None:
                return count
        return len(token_ids)


def _sampling_spec(request: Request, stop_token_ids: frozenset[int]) -> SamplingSpec:
    """The request's sampling, and min_tokens as ids that cannot be drawn before a position."""
    sampling, min_tokens = request.sampling, request.stopping.min_tokens
    return SamplingSpec(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        banned_token_ids=sampling.banned_token_ids,
        banned_sequences=sampling.banned_sequences,
        suppressed_token_ids=tuple(sorted(stop_token_ids)) if min_tokens else (),
        suppressed_before=len(request.prompt_token_ids) + min_tokens if min_tokens else 0,
        num_prompt_tokens=len(request.prompt_token_ids),
    )
