"""Every error Drafthouse raises on purpose, with the numbers that explain it.

DrafthouseError
├── InvalidRequest            the caller's input, naming the field
│   └── ContextExceeded       the prompt does not fit the model's context
├── RequestFailed             one request could not go on; the others are not concerned
├── UnknownModel              no such model is served here, or not to this caller
├── Unauthenticated           no API key, or none that is valid now
├── ConfigurationError        refused at start
│   ├── UnsupportedArchitecture
│   ├── UnsupportedFeature    a checkpoint's option that would change its arithmetic
│   ├── VocabularyMismatch    target and draft do not share their tokens
│   ├── NotBesideTarget       a drafter needs what only the target's own process has
│   └── MissingExtra          something optional was asked for that is not installed
├── Unavailable               something that should answer does not; worth a retry
│   ├── TargetUnavailable
│   └── DrafterUnavailable    costs speed only; answered in one place, the engine
├── GrammarFailed             an answer that cannot match its grammar; ends that request alone
├── Overloaded                the waiting queue is full
├── QuotaExceeded             the tenant has used up what it may
├── DeadlineExceeded          the caller's deadline passed before the answer was there
└── OutOfBlocks               the KV memory has no room; answered by the scheduler

`deployments.statuses` holds the one table that turns them into status codes.
"""

from collections.abc import Sequence


class DrafthouseError(Exception):
    """Base of every deliberate error; `retry_seconds` is when it may be worth asking again."""

    retry_seconds: float | None = None


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

    def __init__(
        self, *, num_prompt_tokens: int, max_model_len: int, field: str = "prompt"
    ) -> None:
        super().__init__(
            field,
            f"{num_prompt_tokens} tokens leave no room in a context of {max_model_len}",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return InvalidRequest, (self.field, self.problem)


class RequestFailed(DrafthouseError):
    """An answer cannot be ended as it was asked for."""


class UnknownModel(DrafthouseError):
    """The request names a model that is not served here."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        super().__init__(f"model {model!r} is not served here; served: {', '.join(served)}")
        self.model = model
        self.served = tuple(served)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.model, self.served)


class Unauthenticated(DrafthouseError):
    """The caller does not say who it is, in a way that is believed; `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(_UNAUTHENTICATED[reason])
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.reason,)


# The same words for a key that never was and one that is no more: nobody learns which.
_UNAUTHENTICATED = {
    "missing": "an API key is needed: authorization: Bearer KEY",
    "unknown": "the API key is not valid",
    "expired": "the API key is not valid",
    "revoked": "the API key is not valid",
}


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


class NotBesideTarget(ConfigurationError):
    """A drafter reads the target's hidden states or KV memory, and these are in other processes."""

    def __init__(self, *, drafter: str, problem: str) -> None:
        super().__init__(f"drafter {drafter!r} has to be in the target's own process: {problem}")
        self.drafter = drafter
        self.problem = problem

    def __reduce__(self) -> tuple[object, ...]:
        return _not_beside_target, (self.drafter, self.problem)


def _not_beside_target(drafter: str, problem: str) -> NotBesideTarget:
    return NotBesideTarget(drafter=drafter, problem=problem)


class MissingExtra(ConfigurationError):
    """What was asked for needs packages that only one of the extras installs."""

    def __init__(self, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs what is not installed: pip install 'drafthouse[{extra}]'"
        )
        self.extra = extra
        self.purpose = purpose

    def __reduce__(self) -> tuple[object, ...]:
        return _missing_extra, (self.extra, self.purpose)


def _missing_extra(extra: str, purpose: str) -> MissingExtra:
    return MissingExtra(extra=extra, purpose=purpose)


class Unavailable(DrafthouseError):
    """A part of the system does not answer now; a retry after `retry_seconds` may succeed."""

    retry_seconds = 1.0


class TargetUnavailable(Unavailable):
    """No target can take the request."""


class DrafterUnavailable(Unavailable):
    """The drafter gave nothing this step; `reason` is one word for the counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"drafter unavailable: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.reason,)


class GrammarFailed(DrafthouseError):
    """A sequence's grammar cannot be followed any further."""


class Overloaded(DrafthouseError):
    """There is no room in the queue, or none in time; the request was not taken.

    After `retry_seconds` there should be. `deadline_seconds` is the request's own, if that is
    what the `wait_seconds` to be expected are too long for.
    """

    retry_seconds: float

    def __init__(
        self,
        *,
        waiting: int,
        limit: int,
        retry_seconds: float = 0.5,
        wait_seconds: float | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        problem = f"{waiting} requests wait already, the limit is {limit}"
        if wait_seconds is not None and deadline_seconds is not None:
            problem = (
                f"{waiting} requests wait already: the answer to this one is expected in "
                f"{wait_seconds:.2f} s, and its deadline is in {deadline_seconds:.2f} s"
            )
        super().__init__(problem)
        self.waiting = waiting
        self.limit = limit
        self.retry_seconds = retry_seconds
        self.wait_seconds = wait_seconds
        self.deadline_seconds = deadline_seconds

    def __reduce__(self) -> tuple[object, ...]:
        numbers = (self.wait_seconds, self.deadline_seconds)
        return _overloaded, (self.waiting, self.limit, self.retry_seconds, *numbers)


def _overloaded(
    waiting: int,
    limit: int,
    retry_seconds: float,
    wait_seconds: float | None,
    deadline_seconds: float | None,
) -> Overloaded:
    return Overloaded(
        waiting=waiting,
        limit=limit,
        retry_seconds=retry_seconds,
        wait_seconds=wait_seconds,
        deadline_seconds=deadline_seconds,
    )


class QuotaExceeded(DrafthouseError):
    """The tenant is at one of its limits, which is named; the request was not taken."""

    def __init__(self, *, limit: str, allowed: float, retry_seconds: float) -> None:
        super().__init__(f"{limit}: the limit of {allowed:g} is reached")
        self.limit = limit
        self.allowed = allowed
        self.retry_seconds = retry_seconds

    def __reduce__(self) -> tuple[object, ...]:
        return _quota_exceeded, (self.limit, self.allowed, self.retry_seconds)


def _quota_exceeded(limit: str, allowed: float, retry_seconds: float) -> QuotaExceeded:
    return QuotaExceeded(limit=limit, allowed=allowed, retry_seconds=retry_seconds)


class DeadlineExceeded(DrafthouseError):
    """There is no time left in which the answer would be of use."""


class OutOfBlocks(DrafthouseError):
    """KV memory is exhausted."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free
