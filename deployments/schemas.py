"""From the wire to a Request: every field is checked, and named when it cannot be served."""

import secrets
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.errors import InvalidRequest, UnknownModel
from cluster.messages import ModelInfo
from cluster.models.reference import GenerationDefaults
from cluster.request import Request, SamplingParams, SpeculationParams, StoppingParams
from cluster.text.tokenizer import ChatMessage, Tokenizer
from protos import inference_pb2

T = TypeVar("T")

MAX_REQUEST_ID_LENGTH = 128
MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_SPECULATION_TOKENS = 64
MIN_TEMPERATURE = 1e-3  # below it, and above 0, the arithmetic would no longer tell it from greedy
MAX_TEMPERATURE = 100.0
ROLES = ("system", "user", "assistant")
SEED_BITS = 63  # of a seed drawn here; one that is given may have 64

REFUSED_FIELDS = (
    "sampling.frequency_penalty",
    "sampling.logit_bias",
    "sampling.num_answers",
    "sampling.presence_penalty",
    "sampling.repetition_penalty",
    "grammar",
    "prompt_logprobs",
    "top_logprobs",
)


def field_paths(descriptor: Any) -> Iterator[str]:  # noqa: ANN401 - protobuf has two types for it
    """The dotted paths of a message's fields; a list of messages is one field."""
    for field in descriptor.fields:
        if field.message_type is None or field.is_repeated:
            yield field.name
        else:
            yield from (f"{field.name}.{path}" for path in field_paths(field.message_type))


SERVED_FIELDS = tuple(field_paths(inference_pb2.GenerateRequest.DESCRIPTOR))  # all are exact


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model. Safe to use from several threads."""

    model: ModelInfo
    tokenizer: Tokenizer
    defaults: GenerationDefaults

    def read(self, message: inference_pb2.GenerateRequest) -> Request:
        """The complete request, with defaults filled in and a seed drawn if none was given.

        Its id is the caller's with a random end, so that no two are ever equal. Raises
        InvalidRequest naming the field by its dotted path, and UnknownModel.
        """
        refuse_unknown_fields(message)
        self.check_model(message.model)
        name = _read_request_id(message)
        prompt_token_ids = self._read_prompt(message)
        return Request(
            request_id=f"{name}-{uuid.uuid4().hex}" if name else uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling=self._read_sampling(message.sampling),
            stopping=self._read_stopping(
                message.stopping, room=self.model.max_model_len - len(prompt_token_ids)
            ),
            speculation=_read_speculation(message.speculation),
            logprobs=message.logprobs,
        )

    def check_model(self, name: str) -> None:
        """Raises UnknownModel; no name at all means the model that is served."""
        if name not in ("", self.model.name):
            raise UnknownModel(name, (self.model.name,))

    def read_text(
        self, message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
    ) -> tuple[int, ...]:
        """Token ids of the message's `prompt`, or of its `messages` if it has no prompt."""
        if message.HasField("prompt"):
            return self.tokenizer.encode(message.prompt)
        if len(message.messages) > MAX_MESSAGES:
            problem = f"{len(message.messages)} are over the limit of {MAX_MESSAGES}"
            raise InvalidRequest("messages", problem)
        for place, turn in enumerate(message.messages):
            if turn.role not in ROLES:
                problem = f"{turn.role!r} is not one of {', '.join(ROLES)}"
                raise InvalidRequest(f"messages[{place}].role", problem)
        return self.tokenizer.chat(
            [ChatMessage(turn.role, turn.content) for turn in message.messages]
        )

    def check_vocabulary(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest unless all ids are in the model's vocabulary."""
        if (largest := max(token_ids, default=0)) >= self.model.vocab_size:
            problem = f"{largest} is not in the vocabulary of {self.model.vocab_size}"
            raise InvalidRequest(field, problem)

    def _read_prompt(self, message: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        field = only_one_of(message, ("prompt", "messages", "token_ids"))
        token_ids = tuple(message.token_ids) if field == "token_ids" else self.read_text(message)
        self.check_vocabulary(field, token_ids)
        if not token_ids:
            raise InvalidRequest(field, "is empty: there is no token to continue from")
        if len(token_ids) >= self.model.max_model_len:
            problem = (
                f"{len(token_ids)} tokens leave no room in a context of {self.model.max_model_len}"
            )
            raise InvalidRequest(field, problem)
        return token_ids

    def _read_sampling(self, message: inference_pb2.Sampling) -> SamplingParams:
        defaults = self.defaults
        temperature = _optional(message, "temperature", defaults.temperature)
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            problem = f"{temperature} is neither 0 nor in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
            raise InvalidRequest("sampling.temperature", problem)
        top_k = _optional(message, "top_k", min(defaults.top_k, self.model.vocab_size))
        _check_range("sampling.top_k", top_k, low=0, high=self.model.vocab_size)
        top_p = _optional(message, "top_p", defaults.top_p)
        if not 0 < top_p <= 1:
            raise InvalidRequest("sampling.top_p", f"{top_p} is not in (0, 1]")
        min_p = _optional(message, "min_p", 0.0)
        _check_range("sampling.min_p", min_p, low=0, high=1)
        seed = message.seed if message.HasField("seed") else secrets.randbits(SEED_BITS)
        return SamplingParams(
            seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )

    def _read_stopping(self, message: inference_pb2.Stopping, *, room: int) -> StoppingParams:
        max_tokens = message.max_tokens if message.HasField("max_tokens") else None
        if max_tokens == 0:
            raise InvalidRequest("stopping.max_tokens", "0 is below 1")
        _check_range(
            "stopping.min_tokens",
            message.min_tokens,
            low=0,
            high=room if max_tokens is None else min(room, max_tokens),
        )
        _check_count("stopping.stop", message.stop, MAX_STOPS)
        for place, stop in enumerate(message.stop):
            _check_range(
                f"stopping.stop[{place}]", len(stop), low=1, high=MAX_STOP_LENGTH, unit="characters"
            )
        _check_count("stopping.stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self.check_vocabulary("stopping.stop_token_ids", message.stop_token_ids)
        return StoppingParams(
            max_tokens=max_tokens,
            min_tokens=message.min_tokens,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            include_stop_text=message.include_stop_text,
        )


def only_one_of(message: Message, fields: Sequence[str]) -> str:
    """The one of the fields that is given. Raises InvalidRequest when none or several are."""
    present = {descriptor.name for descriptor, _ in message.ListFields()}
    given = [field for field in fields if field in present]
    if len(given) != 1:
        names = ", ".join(fields)
        problem = f"{' and '.join(given)} are given" if given else "none is given"
        raise InvalidRequest(
            given[0] if given else fields[0], f"exactly one of {names} is needed; {problem}"
        )
    return given[0]


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raises InvalidRequest for a field that a newer client knows and this server does not."""
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        problem = f"field number {unknown[0].field_number} is not known here"
        raise InvalidRequest(path or message.DESCRIPTOR.name, problem)
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for part in value if descriptor.is_repeated else (value,):
            refuse_unknown_fields(part, f"{path}.{descriptor.name}".lstrip("."))


def _read_request_id(message: inference_pb2.GenerateRequest) -> str:
    name: str = message.request_id
    if len(name) > MAX_REQUEST_ID_LENGTH:
        problem = f"{len(name)} characters are over the limit of {MAX_REQUEST_ID_LENGTH}"
        raise InvalidRequest("request_id", problem)
    if not (name.isascii() and name.isprintable()):
        raise InvalidRequest("request_id", "has a character that is not printable ASCII")
    return name


def _read_speculation(message: inference_pb2.Speculation) -> SpeculationParams:
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    _check_range("speculation.max_tokens", max_tokens or 0, low=0, high=MAX_SPECULATION_TOKENS)
    return SpeculationParams(enabled=_optional(message, "enabled", True), max_tokens=max_tokens)


def _optional(message: Message, field: str, default: T) -> T:
    """A field's value where it is present, else the default."""
    value: T = getattr(message, field) if message.HasField(field) else default
    return value


def _check_range(field: str, value: float, *, low: float, high: float, unit: str = "") -> None:
    """Raises InvalidRequest unless low <= value <= high; NaN never is."""
    if not low <= value <= high:
        what = f"{value} {unit}".strip()
        raise InvalidRequest(field, f"{what} is not in [{low}, {high}]")


def _check_count(field: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(field, f"{len(values)} are over the limit of {limit}")
