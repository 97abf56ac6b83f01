"""Tokens to text for one request: detokenised, and cut at the first stop string."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from cluster.errors import DeadlineExceeded, DrafthouseError, RequestFailed, Unavailable
from cluster.messages import TokenDelta, TopLogprobs
from cluster.request import DEADLINE_PASSED, FinishReason, StoppingParams
from cluster.text.detokenizer import Detokenizer, Vocabulary
from cluster.text.stops import StopChecker


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A TokenDelta as the caller sees it: with its text, and nothing after a stop.

    Text may come later than its tokens, never earlier. `num_steps` is how many steps gave the
    tokens; the first `num_accepted` of them were drafts if that is one.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    num_cached_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None


class TextStream:
    """Turns the deltas of one request into text deltas.

    A stop string ends the answer with the token that completes it: text, token ids, logprobs, top
    logprobs and accepted drafts are cut together. It counts only from the `min_tokens`-th token
    on. The text of an EOS or stop token that ended the answer is stop text too;
    `include_stop_text` keeps it.
    """

    def __init__(self, vocabulary: Vocabulary, stopping: StoppingParams) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._checker = StopChecker(stopping.stop)
        self._stopping = stopping
        self._num_tokens = 0

    def push(self, delta: TokenDelta) -> TextDelta:
        """The next text delta; the last one has a finish_reason."""
        texts: list[str] = []
        for place, token_id in enumerate(delta.token_ids):
            self._num_tokens += 1
            if delta.finish_reason is FinishReason.STOP and place == len(delta.token_ids) - 1:
                texts.append(self._last_text(token_id))
                continue
            new_text = self._detokenizer.push(token_id)
            if self._num_tokens < self._stopping.min_tokens:
                texts.append(self._checker.pass_by(new_text))
                continue
            checked = self._checker.push(new_text)
            texts.append(checked.text)
            if checked.stop is not None:
                stop_text = checked.stop if self._stopping.include_stop_text else ""
                return _cut(delta, num_tokens=place + 1, text="".join(texts) + stop_text)
        if delta.finish_reason is not None:
            texts.append(self._checker.flush())
        return _with_text(delta, "".join(texts))

    def _last_text(self, token_id: int) -> str:
        """The text of the token that ended the answer, after all that was held back."""
        held = self._checker.flush()
        return held + self._detokenizer.push(token_id) if self._stopping.include_stop_text else held


def _with_text(delta: TokenDelta, text: str) -> TextDelta:
    return TextDelta(
        text=text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        top_logprobs=delta.top_logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        num_cached_tokens=delta.num_cached_tokens,
        num_steps=delta.num_steps if delta.token_ids else 0,
        num_drafted=delta.num_drafted,
        num_accepted=delta.num_accepted,
        finish_reason=delta.finish_reason,
    )


def _cut(delta: TokenDelta, *, num_tokens: int, text: str) -> TextDelta:
    return replace(
        _with_text(delta, text),
        token_ids=delta.token_ids[:num_tokens],
        logprobs=delta.logprobs[:num_tokens],
        top_logprobs=delta.top_logprobs[:num_tokens],
        num_accepted=min(delta.num_accepted, num_tokens),
        finish_reason=FinishReason.STOP,
    )


async def stream_text(
    deltas: AsyncIterator[TokenDelta], stream: TextStream
) -> AsyncGenerator[TextDelta, None]:
    """All text deltas of a request; `deltas` is closed before the last one comes out.

    Closing this closes `deltas`, which is an async generator. Raises RequestFailed when the
    sequence alone could not go on, DeadlineExceeded when its time was over, Unavailable when it
    was ended from elsewhere or `deltas` ends without a reason, and DrafthouseError when the engine
    could not go on.
    """
    async with aclosing(cast("AsyncGenerator[TokenDelta, None]", deltas)):
        async for delta in deltas:
            _check_end(delta)
            last = stream.push(delta)
            if last.finish_reason is not None:
                break
            yield last
        else:
            raise Unavailable("the answer broke off")
    yield last


def _check_end(delta: TokenDelta) -> None:
    """Raises when the sequence has ended without its answer."""
    match delta.finish_reason:
        case FinishReason.FAILED:
            raise RequestFailed(delta.error)
        case FinishReason.ABORT if delta.error == DEADLINE_PASSED:
            raise DeadlineExceeded(DEADLINE_PASSED)
        case FinishReason.ABORT:
            raise Unavailable("the server ended the request; it may be sent again")
        case FinishReason.ERROR:
            raise DrafthouseError(f"request {delta.request_id} ended: {delta.error}")
