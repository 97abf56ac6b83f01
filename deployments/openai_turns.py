"""A conversation as OpenAI's clients send it, as the turns a chat template takes."""

import json
from collections.abc import Iterator, Sequence

from cluster.errors import InvalidRequest
from cluster.text.tokenizer import ChatMessage, ToolCall
from deployments.checks import check_count
from deployments.openai_schemas import (
    AssistantMessage,
    Content,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
)
from deployments.schemas import MAX_MESSAGES


def turns(messages: Sequence[Message]) -> Iterator[ChatMessage]:
    """The conversation. Raises InvalidRequest where the parts do not belong together."""
    check_count("messages", len(messages), MAX_MESSAGES)
    if not messages:
        raise InvalidRequest("messages", "is empty")
    called: set[str] = set()
    for place, message in enumerate(messages):
        match message:
            case SystemMessage():
                yield ChatMessage("system", _text(message.content))
            case AssistantMessage(content=None, tool_calls=None | []):
                raise InvalidRequest(f"messages[{place}].content", "is empty, and there is no call")
            case AssistantMessage():
                calls = message.tool_calls or ()
                called |= {call.id for call in calls}
                path = f"messages[{place}].tool_calls"
                yield ChatMessage(
                    "assistant",
                    _text(message.content or ""),
                    tuple(_call(f"{path}[{i}]", call) for i, call in enumerate(calls)),
                )
            case ToolMessage():
                if message.tool_call_id not in called:
                    raise InvalidRequest(
                        f"messages[{place}].tool_call_id", "no call before it has this id"
                    )
                yield ChatMessage("tool", _text(message.content))
            case _:
                yield ChatMessage("user", _text(message.content))


def _call(path: str, call: MessageToolCall) -> ToolCall:
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{path}.function.arguments", "is not the text of a JSON object")
    return ToolCall(call.function.name, arguments)


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
