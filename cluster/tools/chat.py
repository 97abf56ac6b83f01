"""A conversation with a server over gRPC: `drafthouse chat`."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from rich.console import Console

from cluster.errors import DrafthouseError, Unavailable
from cluster.request import Grammar
from cluster.tools.connection import Access, connected
from protos import inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
ACCEPTED_STYLE = "cyan"

Ask = Callable[[Iterable[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What every turn asks for; None is the server's own choice."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    grammar: Grammar | None = None


@dataclass(slots=True)
class Origins:
    """Which characters of an answer came from accepted drafts.

    The wire says it of tokens, and text may come later than its tokens; so the runs of tokens are
    noted by the characters they end at, and text takes them up when it comes.
    """

    text_of: Ask  # the text of token ids, all of an answer's from its first on
    token_ids: list[int] = field(default_factory=list)
    num_shown: int = 0
    ends: list[tuple[int, bool]] = field(default_factory=list)  # (end in characters, accepted)

    def split(self, chunk: inference_pb2.GenerateChunk) -> Iterator[tuple[str, bool]]:
        """The chunk's text in runs of one origin: (text, whether they were accepted drafts).

        Of several steps in one chunk nobody knows which tokens were; none counts as a draft then.
        """
        num_accepted = chunk.num_accepted if chunk.num_steps == 1 else 0
        self._note(chunk.token_ids[:num_accepted], accepted=True)
        self._note(chunk.token_ids[num_accepted:], accepted=False)
        text = chunk.text
        while text:
            while self.ends and self.ends[0][0] <= self.num_shown:
                del self.ends[0]
            end, accepted = self.ends[0] if self.ends else (self.num_shown + len(text), False)
            run, text = text[: end - self.num_shown], text[end - self.num_shown :]
            self.num_shown += len(run)
            yield run, accepted

    def _note(self, token_ids: Iterable[int], *, accepted: bool) -> None:
        before = len(self.token_ids)
        self.token_ids.extend(token_ids)
        if len(self.token_ids) > before:
            self.ends.append((len(self.text_of(self.token_ids)), accepted))


class Conversation:
    """Asks one server, and remembers what was said."""

    def __init__(
        self,
        channel: grpc.Channel,
        options: AnswerOptions,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._metadata = metadata
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._options = options
        self._turns: list[inference_pb2.Message] = []

    def ask(
        self, prompt: str, on_chunk: Callable[[inference_pb2.GenerateChunk], None]
    ) -> dict[str, Any]:
        """The answer as `--json` prints it; its chunks go to `on_chunk` as they come.

        Left by an exception it cancels the call, and forgets this turn. Raises DrafthouseError.
        """
        turns = [*self._turns, inference_pb2.Message(role="user", content=prompt)]
        chunks = []
        with _translated():
            call = self._stub.GenerateStream(self._request(turns), metadata=self._metadata)
            try:
                for chunk in call:
                    chunks.append(chunk)
                    on_chunk(chunk)
            finally:
                call.cancel()
        answer = as_json(chunks)
        self._turns = [*turns, inference_pb2.Message(role="assistant", content=answer["text"])]
        return answer

    def text_of(self, token_ids: Iterable[int]) -> str:
        """The text of token ids. Raises DrafthouseError."""
        with _translated():
            request = inference_pb2.DetokenizeRequest(token_ids=token_ids)
            text: str = self._stub.Detokenize(request, metadata=self._metadata).text
            return text

    def _request(self, turns: list[inference_pb2.Message]) -> inference_pb2.GenerateRequest:
        options = self._options
        return inference_pb2.GenerateRequest(
            messages=turns,
            sampling={"temperature": options.temperature, "seed": options.seed},
            stopping={"max_tokens": options.max_tokens},
            grammar=_wire_grammar(options.grammar),
        )


def _wire_grammar(grammar: Grammar | None) -> inference_pb2.Grammar | None:
    return None if grammar is None else inference_pb2.Grammar(**{grammar.kind: grammar.source})


def as_json(chunks: Iterable[inference_pb2.GenerateChunk]) -> dict[str, Any]:
    """A single streamed answer as one object, with the account that its last message gives."""
    chunks = list(chunks)
    last = chunks[-1]
    reason = inference_pb2.FinishReason.Name(last.finish_reason)
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": reason.removeprefix("FINISH_REASON_").lower(),
        "usage": {
            "prompt_tokens": last.usage.prompt_tokens,
            "completion_tokens": last.usage.completion_tokens,
            "total_tokens": last.usage.total_tokens,
            "cached_tokens": last.usage.cached_tokens,
        },
        "seed": last.seed,
        "speculation": {
            "steps": last.speculation.steps,
            "drafted": last.speculation.drafted,
            "accepted": last.speculation.accepted,
        },
    }


def chat(
    address: str = DEFAULT_ADDRESS,
    *,
    once: str | None = None,
    json_output: bool = False,
    show_drafts: bool = True,
    options: AnswerOptions | None = None,
    access: Access | None = None,
    console: Console | None = None,
) -> None:
    """Answer `once`, or every line that is typed until the input ends.

    `json_output` prints one JSON object per answer instead of its text. `show_drafts` gives
    accepted draft tokens a colour of their own, on a terminal that has colours. Ctrl-C ends the
    answer under way; so does an error, after which a person at a terminal may go on. Raises
    Unavailable when no server answers, and DrafthouseError.
    """
    console = console or Console(highlight=False)
    access = access or Access()
    with connected(address, access) as channel:
        conversation = Conversation(channel, options or AnswerOptions(), access.metadata)
        show = _json_turn if json_output else _text_turn
        coloured = show_drafts and console.color_system is not None
        if once is not None:
            show(conversation, once, console, coloured=coloured)
            return
        for prompt in _typed(console):
            try:
                show(conversation, prompt, console, coloured=coloured)
            except KeyboardInterrupt:
                console.print("[dim](ended)[/dim]")
            except DrafthouseError as error:
                if not console.is_terminal:
                    raise
                console.print(f"({error})", style="dim", markup=False)


def _json_turn(
    conversation: Conversation, prompt: str, console: Console, *, coloured: bool
) -> None:
    """One answer as one line of JSON."""
    del coloured
    answer = conversation.ask(prompt, lambda _: None)
    console.out(json.dumps(answer, ensure_ascii=False), highlight=False)


def _text_turn(
    conversation: Conversation, prompt: str, console: Console, *, coloured: bool
) -> None:
    """One answer as it comes, and a line on how it came about."""
    origins = Origins(conversation.text_of)

    def on_chunk(chunk: inference_pb2.GenerateChunk) -> None:
        if not coloured:
            console.out(chunk.text, end="", highlight=False)
            return
        for text, accepted in origins.split(chunk):
            style = ACCEPTED_STYLE if accepted else None
            console.out(text, end="", style=style, highlight=False)

    try:
        answer = conversation.ask(prompt, on_chunk)
    except DrafthouseError:
        console.print()  # the answer so far is a line of its own
        raise
    console.print()
    if console.is_terminal:
        usage, speculation = answer["usage"], answer["speculation"]
        console.print(
            f"[dim]{usage['completion_tokens']} tokens in {speculation['steps']} steps, "
            f"{speculation['accepted']} of {speculation['drafted']} drafts accepted, "
            f"ended by {answer['finish_reason']}, seed {answer['seed']}[/dim]",
            highlight=False,
        )


def _typed(console: Console) -> Iterator[str]:
    """Lines until the input ends; empty ones are passed over."""
    while True:
        try:
            line = console.input("[bold]> [/bold]" if console.is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


@contextmanager
def _translated() -> Iterator[None]:
    """What the server says went wrong, as an error of ours."""
    try:
        yield
    except grpc.RpcError as error:
        status: Any = error  # a call too, which the type does not say
        unavailable = status.code() is grpc.StatusCode.UNAVAILABLE
        kind = Unavailable if unavailable else DrafthouseError
        raise kind(f"{status.code().name}: {status.details()}") from error
