"""Every error Drafthouse raises on purpose, with the numbers that explain it.

DrafthouseError
├── InvalidRequest            the caller's input, naming the field
│   └── ContextExceeded       the prompt does not fit the model's context
├── UnknownModel              no such model is served here
├── ConfigurationError        refused at start
│   ├── UnsupportedArchitecture
│   ├── UnsupportedFeature    a checkpoint's option that would change its arithmetic
│   └── VocabularyMismatch    target and draft do not share their tokens
├── Unavailable               something that should answer does not; worth a retry
│   ├── TargetUnavailable
│   └── DrafterUnavailable    costs speed only; answered in one place, the engine
├── Overloaded                the waiting queue is full
└── OutOfBlocks               the KV memory has no room; answered by the scheduler

`deployments.grpc_service` holds the one table that turns them into status codes.
"""

from collections.abc import Sequence


class DrafthouseError(Exception):
    """Base of every deliberate error."""


class InvalidRequest(DrafthouseError):
    """A field of the request is outside what is served."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)


class ContextExceeded(InvalidRequest):
    """The prompt leaves no room for a single new token."""

    def __init__(self, *, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            "prompt",
            f"{num_prompt_tokens} tokens leave no room in a context of {max_model_len}",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return InvalidRequest, (self.field, self.problem)


class UnknownModel(DrafthouseError):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(f"model {model!r} is not served here; served: {', '.join(served)}")
        self.model = model
        self.served = tuple(served)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.model, self.served)


class ConfigurationError(DrafthouseError):
    """What was asked for at start cannot be served."""


class UnsupportedArchitecture(ConfigurationError):
    """The checkpoint's architecture is not one the decoder covers."""

    def __init__(self, architecture: str, supported: Sequence[str]) -> None:
        super().__init__(
            f"architecture {architecture!r} is not supported; supported: {', '.join(supported)}"
        )


class UnsupportedFeature(ConfigurationError):
    """The checkpoint asks for arithmetic the decoder does not do."""

    def __init__(self, feature: str, problem: str) -> None:
        super().__init__(f"{feature}: {problem}")


class VocabularyMismatch(ConfigurationError):
    """The draft's token ids do not mean what the target's mean."""

    def __init__(self, *, token_id: int, target_token: str | None, draft_token: str | None) -> None:
        super().__init__(
            f"target and draft vocabularies differ first at token id {token_id}: "
            f"{target_token!r} in the target, {draft_token!r} in the draft"
        )
        self.token_id = token_id


class Unavailable(DrafthouseError):
    """A part of the system does not answer now; a retry may succeed."""


class TargetUnavailable(Unavailable):
    """No target can take the request."""


class DrafterUnavailable(Unavailable):
    """The drafter gave nothing this step; `reason` is one word for the counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"drafter unavailable: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.reason,)


class Overloaded(DrafthouseError):
    """The queue is as long as it may get; the request was not taken."""

    def __init__(self, *, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests wait already, the limit is {limit}")
        self.waiting = waiting
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return _overloaded, (self.waiting, self.limit)


def _overloaded(waiting: int, limit: int) -> Overloaded:
    return Overloaded(waiting=waiting, limit=limit)


class OutOfBlocks(DrafthouseError):
    """KV memory is exhausted."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free
