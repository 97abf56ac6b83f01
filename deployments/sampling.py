"""How the next token is drawn, from the wire: `Sampling` checked and made SamplingParams."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.models.reference import GenerationDefaults
from cluster.request import SamplingParams
from cluster.text.tokenizer import Tokenizer
from deployments.checks import (
    check_above,
    check_count,
    check_range,
    check_vocabulary,
    optional,
)
from protos import inference_pb2

MIN_TEMPERATURE = 1e-3  # below it, and above 0, the arithmetic would no longer tell it from greedy
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_TOKEN_IDS = 1024  # allowed, and banned
MAX_BANNED_WORDS = 64
MAX_BANNED_WORD_LENGTH = 64  # characters
MAX_BANNED_LENGTH = 64  # tokens
MAX_ANSWERS = 16
SEED_BITS = 63  # of a seed drawn here; one that is given may have 64


@dataclass(frozen=True, slots=True)
class SamplingReader:
    """Reads `Sampling` for one model; absent fields take the model's own defaults."""

    vocab_size: int
    tokenizer: Tokenizer
    defaults: GenerationDefaults

    def read(self, message: inference_pb2.Sampling) -> SamplingParams:
        """Those of answer 0, with a seed drawn if none was given. Raises InvalidRequest."""
        defaults = self.defaults
        temperature = optional(message, "temperature", defaults.temperature)
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            problem = f"{temperature} is neither 0 nor in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
            raise InvalidRequest("sampling.temperature", problem)
        top_k = optional(message, "top_k", min(defaults.top_k, self.vocab_size))
        check_range("sampling.top_k", top_k, low=0, high=self.vocab_size)
        top_p = optional(message, "top_p", defaults.top_p)
        check_above("sampling.top_p", top_p, low=0, high=1)
        min_p = optional(message, "min_p", defaults.min_p)
        check_range("sampling.min_p", min_p, low=0, high=1)
        repetition_penalty = optional(message, "repetition_penalty", defaults.repetition_penalty)
        check_above(
            "sampling.repetition_penalty", repetition_penalty, low=0, high=MAX_REPETITION_PENALTY
        )
        words = tuple(self._banned_words(message.banned_words))
        allowed = self._token_ids("allowed_token_ids", message.allowed_token_ids)
        banned = self._token_ids("banned_token_ids", message.banned_token_ids)
        banned |= {word[0] for word in words if len(word) == 1}
        if allowed and allowed <= banned:
            raise InvalidRequest("sampling.allowed_token_ids", "all of them are banned")
        return SamplingParams(
            seed=optional(message, "seed", secrets.randbits(SEED_BITS)),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=_penalty(message, "presence_penalty"),
            frequency_penalty=_penalty(message, "frequency_penalty"),
            logit_bias=self._logit_bias(message),
            allowed_token_ids=tuple(sorted(allowed)) or None,
            banned_token_ids=tuple(sorted(banned)),
            banned_sequences=tuple(word for word in words if len(word) > 1),
        )

    def _logit_bias(self, message: inference_pb2.Sampling) -> tuple[tuple[int, float], ...]:
        """By token id."""
        biases = tuple(sorted(message.logit_bias.items()))
        check_count("sampling.logit_bias", len(biases), MAX_BIASES)
        check_vocabulary("sampling.logit_bias", [key for key, _ in biases], self.vocab_size)
        for token_id, bias in biases:
            check_range(f"sampling.logit_bias[{token_id}]", bias, low=-MAX_BIAS, high=MAX_BIAS)
        return biases

    def _token_ids(self, field: str, token_ids: Sequence[int]) -> set[int]:
        check_count(f"sampling.{field}", len(token_ids), MAX_TOKEN_IDS)
        check_vocabulary(f"sampling.{field}", token_ids, self.vocab_size)
        return set(token_ids)

    def _banned_words(self, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """The runs of tokens that the words stand for."""
        check_count("sampling.banned_words", len(words), MAX_BANNED_WORDS)
        for place, word in enumerate(words):
            field = f"sampling.banned_words[{place}]"
            check_range(field, len(word), low=1, high=MAX_BANNED_WORD_LENGTH, unit="characters")
            forms = self.tokenizer.word(word)
            if not forms:
                raise InvalidRequest(field, "the model has no tokens for it")
            num_tokens = max(map(len, forms))
            check_range(field, num_tokens, low=1, high=MAX_BANNED_LENGTH, unit="tokens")
            yield from forms


def read_num_answers(message: inference_pb2.Sampling) -> int:
    """How many answers are asked for. Raises InvalidRequest."""
    num_answers = optional(message, "num_answers", 1)
    check_range("sampling.num_answers", num_answers, low=1, high=MAX_ANSWERS)
    return num_answers


def _penalty(message: inference_pb2.Sampling, field: str) -> float:
    value = optional(message, field, 0.0)
    check_range(f"sampling.{field}", value, low=-MAX_PENALTY, high=MAX_PENALTY)
    return value
