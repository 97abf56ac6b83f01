"""One request as the engine knows it: its tokens, and how many the target has computed.

token_ids   [ prompt ............ | output ........ ]
            [ computed ........................ | x ]   x: uncomputed; one while decoding
"""

from collections.abc import Callable

from cluster.messages import SamplingSpec, TokenDelta
from cluster.request import FinishReason, Request

Emit = Callable[[TokenDelta], None]


class Sequence:
    """A request under way. Only a commit adds tokens; everyone else reads.

    `seq_id` grows with arrival, so it is also the order of age.
    """

    def __init__(
        self,
        request: Request,
        *,
        seq_id: int,
        emit: Emit,
        eos_token_ids: frozenset[int],
        max_model_len: int,
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
        suppressed_token_ids=tuple(sorted(stop_token_ids)) if min_tokens else (),
        suppressed_before=len(request.prompt_token_ids) + min_tokens if min_tokens else 0,
    )
