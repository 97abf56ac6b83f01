"""Answers as OpenAI gives them: whole, and in chunks."""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.request import FinishReason, Request
from cluster.text.answer import Answer
from cluster.text.stream import TextDelta
from cluster.text.tokenizer import Tokenizer, ToolCall
from deployments.answers import Answers
from deployments.openai_logprobs import Offsets, Tokens
from deployments.openai_reader import Asked
from deployments.openai_tools import ToolCallReader


class Writer(Protocol):
    """Writes the answers of one call."""

    def whole(self, answers: Answers) -> dict[str, Any]:
        """All answers, which have ended."""
        ...

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """What a delta of answer `index` brings, if that is anything yet."""
        ...

    def closing(self, answers: Answers) -> Iterable[dict[str, Any]]:
        """What comes after the last delta."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the answers of one call have in common: `requests` has one for each answer."""

    asked: Asked
    requests: Sequence[Request]
    model: str
    tokenizer: Tokenizer

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """What is around the choices. `kind` is OpenAI's `object`."""
        return {
            "id": self.requests[0].request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }

    def around_all(
        self, kind: str, choices: list[dict[str, Any]], answers: Answers
    ) -> dict[str, Any]:
        """The same around whole answers."""
        prompt = {"prompt_token_ids": list(self.requests[0].prompt_token_ids)}
        return {
            **self.envelope(kind, choices),
            **(prompt if self.asked.return_token_ids else {}),
            "usage": _usage(answers),
            "speculation": _speculation(answers),
        }

    def around_chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """The same around one chunk."""
        chunk = self.envelope(kind, [choice])
        return {**chunk, "usage": None} if self.asked.include_usage else chunk

    def closing(self, kind: str, answers: Answers) -> list[dict[str, Any]]:
        """The chunk without choices, if it was asked for."""
        if not self.asked.include_usage:
            return []
        account = {"usage": _usage(answers), "speculation": _speculation(answers)}
        return [{**self.envelope(kind, []), **account}]

    def extras(
        self, index: int, token_ids: Sequence[int], reason: FinishReason | None
    ) -> dict[str, Any]:
        """The extensions of a choice: its token ids if asked for, and its seed at its end."""
        ids = {"token_ids": list(token_ids)} if self.asked.return_token_ids else {}
        seed = {} if reason is None else {"seed": self.requests[index].sampling.seed}
        return {**ids, **seed}


class ChatWriter:
    """Writes the answers to a conversation."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tokens = Tokens(call.tokenizer.vocabulary)
        self._readers = [ToolCallReader(call.asked.tools) for _ in call.requests]
        self._begun: set[int] = set()

    def whole(self, answers: Answers) -> dict[str, Any]:
        """All answers, which have ended."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers.each)]
        return self._call.around_all("chat.completion", choices, answers)

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """What a delta of answer `index` brings, if that is anything yet."""
        reason = delta.finish_reason
        num_before = self._readers[index].num_calls
        text, calls = self._read(index, delta.text, is_last=reason is not None)
        change: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
        if text or (change and not calls):
            change["content"] = text
        if calls:
            change["tool_calls"] = [
                {"index": num_before + place, **call} for place, call in enumerate(calls)
            ]
        logprobs = self._logprobs(delta) if delta.token_ids else None
        extras = self._call.extras(index, delta.token_ids, reason)
        if not (change or logprobs or extras):
            return
        self._begun.add(index)
        choice = {
            "index": index,
            "delta": change,
            "logprobs": logprobs,
            "finish_reason": self._reason(index, reason),
            **extras,
        }
        yield self._call.around_chunk("chat.completion.chunk", choice)

    def closing(self, answers: Answers) -> Iterable[dict[str, Any]]:
        """What comes after the last delta."""
        return self._call.closing("chat.completion.chunk", answers)

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        text, calls = self._read(index, answer.text, is_last=True)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": self._reason(index, answer.finish_reason),
            **self._call.extras(index, answer.token_ids, answer.finish_reason),
        }

    def _read(self, index: int, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text and calls that are certain."""
        if not self._call.asked.tools:
            return text, []
        reader = self._readers[index]
        found = reader.push(text)
        if is_last:
            found += reader.finish()
        calls = [_call(piece) for piece in found if isinstance(piece, ToolCall)]
        return "".join(piece for piece in found if isinstance(piece, str)), calls

    def _reason(self, index: int, reason: FinishReason | None) -> str | None:
        called = self._readers[index].num_calls > 0
        return "tool_calls" if called and reason is FinishReason.STOP else reason

    def _logprobs(self, part: TextDelta | Answer) -> dict[str, Any] | None:
        if not self._call.asked.message.logprobs:
            return None
        return self._tokens.chat(part.token_ids, part.logprobs, part.top_logprobs)


class CompletionWriter:
    """Writes the answers to a text; with `echo` each begins with that."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tokens = Tokens(call.tokenizer.vocabulary)
        message = call.asked.message
        self._prompt = ""
        if call.asked.echo:
            decode = call.tokenizer.decode
            self._prompt = (
                message.prompt if message.HasField("prompt") else decode(message.token_ids)
            )
        vocabulary = call.tokenizer.vocabulary
        self._offsets = [Offsets(vocabulary, len(self._prompt)) for _ in call.requests]
        self._begun: set[int] = set()

    def whole(self, answers: Answers) -> dict[str, Any]:
        """All answers, which have ended."""
        choices = [
            self._choice(index, answer, answer.text) for index, answer in enumerate(answers.each)
        ]
        return self._call.around_all("text_completion", choices, answers)

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """What a delta of answer `index` brings."""
        choice = self._choice(index, delta, delta.text)
        yield self._call.around_chunk("text_completion", choice)

    def closing(self, answers: Answers) -> Iterable[dict[str, Any]]:
        """What comes after the last delta."""
        return self._call.closing("text_completion", answers)

    def _choice(self, index: int, part: TextDelta | Answer, text: str) -> dict[str, Any]:
        is_first = index not in self._begun
        self._begun.add(index)
        return {
            "index": index,
            "text": self._prompt + text if is_first else text,
            "logprobs": self._logprobs(index, part, is_first=is_first),
            "finish_reason": part.finish_reason,
            **self._call.extras(index, part.token_ids, part.finish_reason),
        }

    def _logprobs(
        self, index: int, part: TextDelta | Answer, *, is_first: bool
    ) -> dict[str, Any] | None:
        message = self._call.asked.message
        if not message.logprobs:
            return None
        token_ids, logprobs = list(part.token_ids), list[float | None](part.logprobs)
        offsets = self._offsets[index].push(token_ids)
        if is_first and message.prompt_logprobs:
            prompt = self._call.requests[index].prompt_token_ids
            token_ids = [*prompt, *token_ids]
            logprobs = [None, *part.prompt_logprobs, *logprobs]
            offsets = Offsets(self._call.tokenizer.vocabulary).push(prompt) + offsets
        return self._tokens.completion(token_ids, logprobs, part.top_logprobs, offsets)


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _usage(answers: Answers) -> dict[str, Any]:
    return {
        "prompt_tokens": answers.num_prompt_tokens,
        "completion_tokens": answers.num_tokens,
        "total_tokens": answers.num_prompt_tokens + answers.num_tokens,
        "prompt_tokens_details": {"cached_tokens": answers.each[0].num_cached_tokens},
    }


def _speculation(answers: Answers) -> dict[str, int]:
    return {
        "steps": sum(answer.num_steps for answer in answers.each),
        "drafted": sum(answer.num_drafted for answer in answers.each),
        "accepted": sum(answer.num_accepted for answer in answers.each),
    }
