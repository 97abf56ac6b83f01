"""From OpenAI's bodies to the messages of inference.proto, which are then read as any other."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from cluster.errors import ContextExceeded, InvalidRequest
from deployments.openai_schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedChoice,
    ResponseFormat,
)
from deployments.openai_tools import (
    END,
    Functions,
    calls_grammar,
    check_names,
    check_template,
    text_with_calls_grammar,
)
from deployments.openai_turns import turns
from deployments.schemas import RequestReader
from protos import inference_pb2

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of /v1/completions alone
MAX_LOGIT_BIAS_KEY = 20  # characters of a token id
SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# Where a field of inference.proto has another name here; the others have only lost their message.
NAMES = {
    "sampling.num_answers": "n",
    "sampling.banned_words": "bad_words",
    "stopping.include_stop_text": "include_stop_str_in_output",
    "grammar.json_schema": "response_format.json_schema.schema",
    "grammar.lark": "tools",
}
PARTS = ("sampling.", "stopping.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body that was read: what to generate, and what the answer has to look like.

    `names` are OpenAI's for fields of the message. `tools` are the names of functions whose calls
    are told from text. With `echo` an answer's text begins with the prompt.
    """

    message: inference_pb2.GenerateRequest
    names: Mapping[str, str]
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    tools: tuple[str, ...] = ()
    echo: bool = False

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """The same error in words of this API."""
        match = re.match(r"[\w.]+", error.field)
        path = match[0] if match else error.field
        name = self.names.get(path, path)
        for part in PARTS:
            name = name.removeprefix(part)
        if isinstance(error, ContextExceeded):
            return ContextExceeded(
                num_prompt_tokens=error.num_prompt_tokens,
                max_model_len=error.max_model_len,
                field=name,
            )
        return InvalidRequest(name + error.field[len(path) :], error.problem)


@dataclass(frozen=True, slots=True)
class OpenAIReader:
    """Reads bodies for one model. Slow for long prompts: not for an event loop then."""

    reader: RequestReader

    def chat(self, body: ChatRequest) -> Asked:
        """What a conversation's continuation asks for. Raises InvalidRequest."""
        self.reader.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise InvalidRequest("max_completion_tokens", "excludes max_tokens, its older name")
        limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        message = _message(body, request_id="chatcmpl", max_tokens=getattr(body, limit))
        message.logprobs = bool(body.logprobs)
        message.top_logprobs = body.top_logprobs or 0
        functions = self._functions(body)
        if functions:
            _make_call(message, body, functions)
        message.token_ids.extend(self._prompt(body, with_tools=bool(functions)))
        asked = _asked(body, message)
        names = {
            **asked.names,
            "token_ids": "messages",
            "prompt": "messages",
            "stopping.max_tokens": limit,
        }
        return replace(asked, names=names, tools=tuple(functions))

    def completion(self, body: CompletionRequest) -> Asked:
        """What a text's continuation asks for. Raises InvalidRequest."""
        self.reader.check_model(body.model)
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        message = _message(body, request_id="cmpl", max_tokens=max_tokens)
        prompt = _only_prompt(body)
        if isinstance(prompt, str):
            message.prompt = prompt
        else:
            message.token_ids.extend(prompt)
        message.logprobs = body.logprobs is not None
        message.top_logprobs = body.logprobs or 0
        if body.echo and body.logprobs:
            raise InvalidRequest("logprobs", f"{body.logprobs} with echo is not served; 0 is")
        message.prompt_logprobs = bool(body.echo and message.logprobs)
        if message.prompt_logprobs and (body.n or 1) > 1:
            raise InvalidRequest("n", f"{body.n} with echo and logprobs is not served; 1 is")
        asked = _asked(body, message)
        names = {**asked.names, "token_ids": "prompt", "top_logprobs": "logprobs"}
        return replace(asked, names=names, echo=bool(body.echo))

    def _prompt(self, body: ChatRequest, *, with_tools: bool) -> tuple[int, ...]:
        """Token ids of the conversation. Raises InvalidRequest."""
        conversation = list(turns(body.messages))
        for place, turn in enumerate(conversation):
            if (turn.tool_calls or turn.role == "tool") and not self._has_tools:
                problem = "this model's chat template has no tools"
                raise InvalidRequest(f"messages[{place}]", problem)
        leave_out = {"function": {"strict"}}  # no one's business but the grammar's
        tools = [
            tool.model_dump(exclude_none=True, exclude=leave_out)
            for tool in (body.tools if with_tools else None) or ()
        ]
        return self.reader.tokenizer.chat(conversation, tools)

    @property
    def _has_tools(self) -> bool:
        return self.reader.tokenizer.tool_template is not None

    def _functions(self, body: ChatRequest) -> Functions:
        """Those that may be called, if any."""
        if not body.tools:
            for name in ("tool_choice", "parallel_tool_calls"):
                if getattr(body, name) not in (None, "none"):
                    raise InvalidRequest(name, "needs tools")
            return {}
        check_names([tool.function.name for tool in body.tools])
        if body.tool_choice == "none":
            return {}
        check_template(self.reader.tokenizer.tool_template)
        if not (body.response_format is None or body.response_format.type == "text"):
            raise InvalidRequest("response_format", "excludes tools that may be called")
        return {tool.function.name: tool.function.parameters for tool in body.tools}


def _message(
    body: GenerationRequest, *, request_id: str, max_tokens: int | None
) -> inference_pb2.GenerateRequest:
    """What both kinds of bodies have in common."""
    message = inference_pb2.GenerateRequest(model=body.model, request_id=request_id)
    _fill_sampling(message.sampling, body)
    _fill_stopping(message.stopping, body, max_tokens)
    if body.speculation is not None:
        for name, value in body.speculation.model_dump(exclude_none=True).items():
            setattr(message.speculation, name, value)
    if (schema := _schema(body.response_format)) is not None:
        message.grammar.json_schema = schema
    return message


def _fill_sampling(sampling: inference_pb2.Sampling, body: GenerationRequest) -> None:
    for name in SAMPLING:
        if (value := getattr(body, name)) is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        sampling.top_k = max(body.top_k, 0)  # -1 is off, too
    if body.seed is not None:
        sampling.seed = body.seed % 2**64
    if body.n is not None:
        sampling.num_answers = body.n
    sampling.logit_bias.update(_logit_bias(body.logit_bias or {}))
    sampling.allowed_token_ids.extend(body.allowed_token_ids or ())
    sampling.banned_words.extend(body.bad_words or ())


def _fill_stopping(
    stopping: inference_pb2.Stopping, body: GenerationRequest, max_tokens: int | None
) -> None:
    if max_tokens is not None:
        stopping.max_tokens = max_tokens
    stopping.min_tokens = body.min_tokens or 0
    stopping.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    stopping.stop_token_ids.extend(body.stop_token_ids or ())
    stopping.ignore_eos = bool(body.ignore_eos)
    stopping.include_stop_text = bool(body.include_stop_str_in_output)


def _asked(body: GenerationRequest, message: inference_pb2.GenerateRequest) -> Asked:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options", "needs stream")
    return Asked(
        message=message,
        names=NAMES,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )


def _schema(wanted: ResponseFormat | None) -> str | None:
    match wanted:
        case JsonObjectFormat():
            return '{"type": "object"}'
        case JsonSchemaFormat():
            return json.dumps(wanted.json_schema.schema_)
        case _:
            return None


def _logit_bias(biases: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_LOGIT_BIAS_KEY):
            raise InvalidRequest(f"logit_bias[{key[:MAX_LOGIT_BIAS_KEY]}]", "is not a token id")
        if int(key) >= 2**32:
            raise InvalidRequest(f"logit_bias[{key}]", "is not in the vocabulary")
        yield int(key), bias


def _only_prompt(body: CompletionRequest) -> str | Sequence[int]:
    """A text or token ids. Raises InvalidRequest for several prompts: those are several calls."""
    prompt = body.prompt
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return cast("str | list[int]", prompt)
    if len(prompt) > 1:
        raise InvalidRequest("prompt", f"{len(prompt)} prompts are given, 1 is served")
    return prompt[0]


def _make_call(
    message: inference_pb2.GenerateRequest, body: ChatRequest, functions: Functions
) -> None:
    """What the choice of a tool means for the text of the answer."""
    several = body.parallel_tool_calls is not False
    strict = {tool.function.name for tool in body.tools or () if tool.function.strict}
    match body.tool_choice:
        case NamedChoice(function=chosen):
            if chosen.name not in functions:
                raise InvalidRequest("tool_choice.function.name", f"no tool is named {chosen.name}")
            named = {chosen.name: functions[chosen.name]}
            message.grammar.lark = calls_grammar(named, several=False).source
        case "required":
            message.grammar.lark = calls_grammar(functions, several=several).source
        case _:
            if strict:
                loose: Functions = {
                    name: schema if name in strict else {"type": "object"}
                    for name, schema in functions.items()
                }
                message.grammar.lark = text_with_calls_grammar(loose).source
            if not several:
                message.stopping.stop.append(END)
