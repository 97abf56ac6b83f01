"""Every field of OpenAI's HTTP API and how it is served: `drafthouse fields --openai`."""

from enum import StrEnum


class Served(StrEnum):
    """How a field is treated."""

    EXACT = "exact"
    EXTENSION = "exact, an extension"
    NO_EFFECT = "taken, without effect"
    REFUSED = "refused"


BOTH, CHAT, COMPLETIONS = "both", "/v1/chat/completions", "/v1/completions"

FIELDS: dict[Served, dict[str, tuple[str, ...]]] = {
    Served.EXACT: {
        BOTH: (
            "model",
            "temperature",
            "top_p",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "seed",
            "n",
            "max_tokens",
            "stop",
            "stream",
            "stream_options.include_usage",
        ),
        CHAT: (
            "messages",
            "max_completion_tokens",
            "logprobs",
            "top_logprobs",
            "response_format",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        ),
        COMPLETIONS: ("prompt", "echo", "logprobs"),
    },
    Served.EXTENSION: {
        BOTH: (
            "top_k",
            "min_p",
            "repetition_penalty",
            "allowed_token_ids",
            "bad_words",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
            "include_stop_str_in_output",
            "return_token_ids",
            "speculation.enabled",
            "speculation.max_tokens",
        ),
        COMPLETIONS: ("response_format",),
    },
    Served.NO_EFFECT: {
        BOTH: ("user",),
        CHAT: ("metadata", "prompt_cache_key", "safety_identifier", "store"),
    },
    Served.REFUSED: {
        BOTH: ("stream_options.include_obfuscation",),
        CHAT: (
            "audio",
            "function_call",
            "functions",
            "modalities",
            "moderation",
            "prediction",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning_effort",
            "service_tier",
            "verbosity",
            "web_search_options",
        ),
        COMPLETIONS: ("best_of", "suffix"),
    },
}


def names(served: Served, path: str) -> frozenset[str]:
    """The fields that are served so at a path, those of both included."""
    parts = FIELDS[served]
    return frozenset({*parts.get(BOTH, ()), *parts.get(path, ())})


def is_refused(field: str) -> bool:
    """Whether a field is one of OpenAI's that is not served, at any path."""
    return any(field in fields for fields in FIELDS[Served.REFUSED].values())


def openai_fields_table() -> str:
    """All fields as a table in Markdown."""
    rows = [("served", "path", "fields"), ("---", "---", "---")]
    for served, parts in FIELDS.items():
        for path, fields in parts.items():
            listed = ", ".join(f"`{name}`" for name in fields)
            rows.append((served, path if path == BOTH else f"`{path}`", listed))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
