"""The bodies of OpenAI's HTTP API, as far as they are served: types only, limits are checked once.

A field is absent when it is null. What these models do not have is refused by name; see
`cluster.tools.openai_fields` for the list.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Body(BaseModel):
    """Base of every part: closed, and no value is taken for one of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TextPart(Body):
    """A part of a turn; texts are all there is."""

    type: Literal["text"]
    text: str


Content = str | Many[TextPart]


class SystemMessage(Body):
    """What the model is told to be; `developer` is the newer word for it."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Body):
    """What a user says."""

    role: Literal["user"]
    content: Content


class CalledFunction(Body):
    """A function that was called; `arguments` are a JSON object's text."""

    name: Name
    arguments: str


class MessageToolCall(Body):
    """One call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Body):
    """An earlier answer, with what OpenAI's client puts into the ones it gives back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Many[MessageToolCall] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Body):
    """What a called function gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema; `name` and `description` have no effect, and it is always kept to."""

    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class Function(Body):
    """A function the model may call; `parameters` is a JSON schema of an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Functions are the only tools."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The name of a function."""

    name: Name


class NamedChoice(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


class StreamOptions(Body):
    """With `include_usage` one more chunk comes at the end, without choices."""

    include_usage: bool | None = None


class Speculation(Body):
    """The caller's say over drafting; an extension."""

    enabled: bool | None = None
    max_tokens: UInt32 | None = None


class GenerationRequest(Body):
    """What both ways of asking have; the second half are extensions, named as in vLLM."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    stop: str | Many[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: Many[UInt32] | None = None
    bad_words: Many[str] | None = None
    stop_token_ids: Many[UInt32] | None = None
    min_tokens: UInt32 | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    speculation: Speculation | None = None


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Many[Message]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | Many[UInt32] | Many[str] | Many[Many[UInt32]]
    echo: bool | None = None
    logprobs: UInt32 | None = None
