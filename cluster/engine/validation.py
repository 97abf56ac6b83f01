"""What the engine refuses before it takes a request: anything that could harm the others."""

import math
from collections.abc import Iterable, Sequence

from cluster.engine.limits import EngineLimits
from cluster.errors import ContextExceeded, InvalidRequest
from cluster.request import Request, SamplingParams, StoppingParams

MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_BANNED_SEQUENCES = 256
MAX_BANNED_LENGTH = 64


def validate(request: Request, limits: EngineLimits) -> None:
    """Raises InvalidRequest naming the first field that cannot be served, or ContextExceeded."""
    num_prompt_tokens = len(request.prompt_token_ids)
    _require(num_prompt_tokens > 0, "prompt", "is empty")
    _check_vocabulary("prompt", request.prompt_token_ids, limits)
    if num_prompt_tokens >= limits.max_model_len:
        raise ContextExceeded(
            num_prompt_tokens=num_prompt_tokens, max_model_len=limits.max_model_len
        )
    num_tokens = num_prompt_tokens + len(request.output_token_ids)
    _check_vocabulary("output_token_ids", request.output_token_ids, limits)
    _require(
        num_tokens <= limits.max_model_len,
        "output_token_ids",
        f"{num_tokens} tokens with the prompt are over the context of {limits.max_model_len}",
    )
    _check_sampling(request.sampling)
    _check_penalties(request.sampling)
    _check_token_choice(request.sampling, limits)
    _check_stopping(request.stopping, limits)
    top_logprobs = request.top_logprobs
    _require(
        0 <= top_logprobs <= MAX_TOP_LOGPROBS,
        "top_logprobs",
        f"{top_logprobs} is not in 0..{MAX_TOP_LOGPROBS}",
    )
    cap = request.speculation.max_tokens
    _require(cap is None or cap >= 0, "speculation.max_tokens", f"{cap} is below 0")


def _check_sampling(sampling: SamplingParams) -> None:
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(sampling, name)
        _require(math.isfinite(value), f"sampling.{name}", f"{value} is not a finite number")
    _require(0 <= sampling.seed <= MAX_SEED, "sampling.seed", "is not in 0..2^64-1")
    _require(
        sampling.temperature >= 0, "sampling.temperature", f"{sampling.temperature} is below 0"
    )
    _require(sampling.top_k >= 0, "sampling.top_k", f"{sampling.top_k} is below 0")
    _require(0 < sampling.top_p <= 1, "sampling.top_p", f"{sampling.top_p} is not in (0, 1]")
    _require(0 <= sampling.min_p <= 1, "sampling.min_p", f"{sampling.min_p} is not in [0, 1]")


def _check_penalties(sampling: SamplingParams) -> None:
    penalty = sampling.repetition_penalty
    _require(
        math.isfinite(penalty) and penalty > 0,
        "sampling.repetition_penalty",
        f"{penalty} is not a finite number above 0",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        _require(
            -MAX_PENALTY <= value <= MAX_PENALTY,
            f"sampling.{name}",
            f"{value} is not in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]",
        )


def _check_token_choice(sampling: SamplingParams, limits: EngineLimits) -> None:
    """What is said of single tokens: ids that exist, in numbers that a step can bear."""
    biased = [token_id for token_id, _ in sampling.logit_bias]
    _check_ids("sampling.logit_bias", biased, limits, at_most=MAX_BIASES)
    for token_id, bias in sampling.logit_bias:
        _require(
            -MAX_BIAS <= bias <= MAX_BIAS,
            "sampling.logit_bias",
            f"{bias} for token id {token_id} is not in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
        )
    banned = sampling.banned_token_ids
    _check_ids("sampling.banned_token_ids", banned, limits, at_most=limits.vocab_size)
    if (allowed := sampling.allowed_token_ids) is not None:
        _check_ids("sampling.allowed_token_ids", allowed, limits, at_most=limits.vocab_size)
        _require(
            bool(set(allowed) - set(banned)),
            "sampling.allowed_token_ids",
            "has no token that is not banned" if allowed else "is empty",
        )
    sequences = sampling.banned_sequences
    _require(
        len(sequences) <= MAX_BANNED_SEQUENCES,
        "sampling.banned_sequences",
        f"{len(sequences)} are more than {MAX_BANNED_SEQUENCES}",
    )
    for sequence in sequences:
        _require(
            2 <= len(sequence) <= MAX_BANNED_LENGTH,  # noqa: PLR2004 - one token is a banned id
            "sampling.banned_sequences",
            f"one has {len(sequence)} tokens, not 2..{MAX_BANNED_LENGTH}",
        )
        _check_vocabulary("sampling.banned_sequences", sequence, limits)


def _check_ids(field: str, token_ids: Sequence[int], limits: EngineLimits, *, at_most: int) -> None:
    """Ids of the vocabulary, none of them twice."""
    _require(len(token_ids) <= at_most, field, f"{len(token_ids)} ids are more than {at_most}")
    _check_vocabulary(field, token_ids, limits)
    _require(len(set(token_ids)) == len(token_ids), field, "has a token id twice")


def _check_stopping(stopping: StoppingParams, limits: EngineLimits) -> None:
    max_tokens, min_tokens = stopping.max_tokens, stopping.min_tokens
    _require(min_tokens >= 0, "stopping.min_tokens", f"{min_tokens} is below 0")
    if max_tokens is not None:
        _require(max_tokens >= 1, "stopping.max_tokens", f"{max_tokens} is below 1")
        _require(
            min_tokens <= max_tokens,
            "stopping.min_tokens",
            f"{min_tokens} is over max_tokens {max_tokens}",
        )
    _check_vocabulary("stopping.stop_token_ids", stopping.stop_token_ids, limits)


def _check_vocabulary(field: str, token_ids: Iterable[int], limits: EngineLimits) -> None:
    for token_id in token_ids:
        _require(
            0 <= token_id < limits.vocab_size,
            field,
            f"token id {token_id} is not in the vocabulary of {limits.vocab_size}",
        )


def _require(holds: bool, field: str, problem: str) -> None:  # noqa: FBT001 - the condition is the point
    if not holds:
        raise InvalidRequest(field, problem)
