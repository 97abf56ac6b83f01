"""From the wire to Requests: every field is checked, and named when it cannot be served."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cluster.errors import ContextExceeded, InvalidRequest, UnknownModel
from cluster.grammar.trial import try_grammar
from cluster.messages import ModelInfo
from cluster.models.reference import GenerationDefaults
from cluster.request import (
    Grammar,
    GrammarKind,
    Request,
    SpeculationParams,
    StoppingParams,
    answer_seed,
)
from cluster.text.tokenizer import ChatMessage, Tokenizer
from deployments.checks import (
    check_count,
    check_range,
    check_vocabulary,
    only_one_of,
    optional,
    refuse_unknown_fields,
)
from deployments.sampling import SamplingReader, read_num_answers
from protos import inference_pb2

MAX_REQUEST_ID_LENGTH = 128
MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_SPECULATION_TOKENS = 64
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 100
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests for one model. Safe to use from several threads."""

    model: ModelInfo
    tokenizer: Tokenizer
    defaults: GenerationDefaults

    def read(self, message: inference_pb2.GenerateRequest) -> tuple[Request, ...]:
        """One complete request for each answer, with defaults filled in and seeds.

        A grammar takes milliseconds to check, and seconds at worst: not for an event loop.
        Their ids are the caller's with a random end, so that no two are ever equal. Raises
        InvalidRequest naming the field by its dotted path, and UnknownModel.
        """
        refuse_unknown_fields(message)
        self.check_model(message.model)
        name = _read_request_id(message)
        prompt_token_ids = self._read_prompt(message)
        check_range("top_logprobs", message.top_logprobs, low=0, high=MAX_TOP_LOGPROBS)
        check_range("priority", message.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        first = Request(
            request_id=f"{name}-{uuid.uuid4().hex}" if name else uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling=self._sampling_reader().read(message.sampling),
            stopping=self._read_stopping(
                message.stopping, room=self.model.max_model_len - len(prompt_token_ids)
            ),
            speculation=_read_speculation(message.speculation),
            grammar=self._read_grammar(message),
            logprobs=message.logprobs or message.top_logprobs > 0,
            top_logprobs=message.top_logprobs,
            prompt_logprobs=message.prompt_logprobs,
            priority=message.priority,
        )
        num_answers = read_num_answers(message.sampling)
        return (first, *(_further(first, index) for index in range(1, num_answers)))

    def check_model(self, name: str) -> None:
        """Raises UnknownModel; no name at all means the model that is served."""
        if name not in ("", self.model.name):
            raise UnknownModel(name, (self.model.name,))

    def read_text(
        self, message: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest
    ) -> tuple[int, ...]:
        """Token ids of the message's `prompt`, or of its `messages` if it has no prompt.

        What is certainly longer than a context is not tokenised at all, for that takes seconds.
        """
        if message.HasField("prompt"):
            self._check_length("prompt", len(message.prompt))
            return self.tokenizer.encode(message.prompt)
        check_count("messages", len(message.messages), MAX_MESSAGES)
        self._check_length("messages", sum(len(turn.content) for turn in message.messages))
        for place, turn in enumerate(message.messages):
            if turn.role not in ROLES:
                problem = f"{turn.role!r} is not one of {', '.join(ROLES)}"
                raise InvalidRequest(f"messages[{place}].role", problem)
        return self.tokenizer.chat(
            [ChatMessage(turn.role, turn.content) for turn in message.messages]
        )

    def _check_length(self, field: str, num_characters: int) -> None:
        """Raises InvalidRequest where not even the longest tokens would fit in a context."""
        most = _longest_token(self.tokenizer) * self.model.max_model_len
        if num_characters > most:
            problem = (
                f"{num_characters} characters are over the limit of {most}: they leave no room in "
                f"a context of {self.model.max_model_len}"
            )
            raise InvalidRequest(field, problem)

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest unless all ids are in the model's vocabulary."""
        check_vocabulary(field, token_ids, self.model.vocab_size)

    def _read_prompt(self, message: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        field = only_one_of(message, ("prompt", "messages", "token_ids"))
        token_ids = tuple(message.token_ids) if field == "token_ids" else self.read_text(message)
        self.check_token_ids(field, token_ids)
        if not token_ids:
            raise InvalidRequest(field, "is empty: there is no token to continue from")
        if len(token_ids) >= self.model.max_model_len:
            raise ContextExceeded(
                num_prompt_tokens=len(token_ids),
                max_model_len=self.model.max_model_len,
                field=field,
            )
        return token_ids

    def _sampling_reader(self) -> SamplingReader:
        return SamplingReader(self.model.vocab_size, self.tokenizer, self.defaults)

    def _read_stopping(self, message: inference_pb2.Stopping, *, room: int) -> StoppingParams:
        max_tokens = message.max_tokens if message.HasField("max_tokens") else None
        if max_tokens == 0:
            raise InvalidRequest("stopping.max_tokens", "0 is below 1")
        check_range(
            "stopping.min_tokens",
            message.min_tokens,
            low=0,
            high=room if max_tokens is None else min(room, max_tokens),
        )
        check_count("stopping.stop", len(message.stop), MAX_STOPS)
        for place, stop in enumerate(message.stop):
            check_range(
                f"stopping.stop[{place}]", len(stop), low=1, high=MAX_STOP_LENGTH, unit="characters"
            )
        check_count("stopping.stop_token_ids", len(message.stop_token_ids), MAX_STOP_TOKEN_IDS)
        self.check_token_ids("stopping.stop_token_ids", message.stop_token_ids)
        return StoppingParams(
            max_tokens=max_tokens,
            min_tokens=message.min_tokens,
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            include_stop_text=message.include_stop_text,
        )

    def _read_grammar(self, message: inference_pb2.GenerateRequest) -> Grammar | None:
        if not message.HasField("grammar"):
            return None
        kind = only_one_of(message.grammar, tuple(GrammarKind), path="grammar")
        grammar = Grammar(GrammarKind(kind), getattr(message.grammar, kind))
        try_grammar(grammar, self.tokenizer)
        return grammar


@lru_cache(maxsize=2)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest; of a token of bytes there is one for each."""
    return max((len(token) for token in tokenizer.vocabulary.tokens if token), default=1)


def _further(first: Request, index: int) -> Request:
    """The request for answer `index`; what is told of the prompt is told by the first."""
    seed = answer_seed(first.sampling.seed, index)
    return replace(
        first,
        request_id=f"{first.request_id}.{index}",
        sampling=replace(first.sampling, seed=seed),
        prompt_logprobs=False,
    )


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
    check_range("speculation.max_tokens", max_tokens or 0, low=0, high=MAX_SPECULATION_TOKENS)
    return SpeculationParams(enabled=optional(message, "enabled", True), max_tokens=max_tokens)
