"""Whichever way a request ends, it is counted once and as what it was."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import (
    DrafthouseError,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    TargetUnavailable,
    UnknownModel,
)
from cluster.metrics import GatewayMetrics
from cluster.request import FinishReason
from cluster.text.stream import TextDelta
from deployments.account import Account
from deployments.answers import Answers
from tests.harness import make_request, series

TOKENS = TextDelta(token_ids=(1, 2, 3))
LAST = TextDelta(token_ids=(4,), finish_reason=FinishReason.STOP)


def counted(
    deltas: list[TextDelta], error: BaseException | None, *, indices: Sequence[int] = ()
) -> dict[str, float]:
    """What is not zero after the deltas, each of the answer at its index, and then the error."""
    registry = CollectorRegistry()
    answers = Answers([make_request(range(7))] * (1 + max(indices, default=0)))
    with suppress(BaseException), Account(GatewayMetrics(registry, model="m")) as account:
        for delta, index in zip(deltas, indices or [0] * len(deltas), strict=True):
            answers.each[index].add(delta)
            account.deliver(index, delta, answers)
        if error is not None:
            raise error
    names = ("requests_total", "_tokens_total", "_count")
    return {
        name.removeprefix("drafthouse_"): value
        for name, value in series(registry).items()
        if value and any(part in name for part in names)
    }


@pytest.mark.parametrize(
    ("deltas", "error", "outcome"),
    [
        ([LAST], None, "stop"),
        ([], InvalidRequest("prompt", "is empty"), "refused"),
        ([], UnknownModel("a", ("b",)), "refused"),
        ([], Overloaded(waiting=1, limit=1), "refused"),
        ([], TargetUnavailable("none"), "refused"),
        ([], DrafthouseError("failed at once"), "error"),
        ([], RequestFailed("no token is left"), "failed"),
        ([TOKENS], RequestFailed("no token is left"), "failed"),
        ([], ValueError("a bug"), "error"),
        ([TOKENS], TargetUnavailable("all gone"), "error"),
        ([], asyncio.CancelledError(), "abort"),
        ([TOKENS], asyncio.CancelledError(), "abort"),
        ([TOKENS], GeneratorExit(), "abort"),
        ([TOKENS, LAST], GeneratorExit(), "stop"),
    ],
)
def test_outcomes(deltas: list[TextDelta], error: BaseException | None, outcome: str) -> None:
    """One outcome for each end; an answer that was complete stays so when the caller hangs up."""
    outcomes = {name for name in counted(deltas, error) if name.startswith("requests_total")}
    assert outcomes == {f"requests_total{{outcome={outcome}}}"}


def test_tokens_and_gaps() -> None:
    """A chunk of one after a chunk of three: one first token, one gap, four tokens, one prompt."""
    assert counted([TOKENS, TextDelta(text="held"), LAST], None) == {
        "requests_total{outcome=stop}": 1,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 4,
        "time_to_first_token_seconds_count": 1,
        "inter_token_seconds_count": 1,
        "request_seconds_count": 1,
    }


def test_several_answers_are_one_request() -> None:
    """The prompt and the end count once, when all have ended; first tokens count for each."""
    ended = TextDelta(token_ids=(4,), finish_reason=FinishReason.LENGTH)
    assert counted([TOKENS, ended, LAST], None, indices=[0, 1, 0]) == {
        "requests_total{outcome=length}": 1,
        "prompt_tokens_total": 7,
        "generation_tokens_total": 5,
        "time_to_first_token_seconds_count": 2,
        "inter_token_seconds_count": 1,
        "request_seconds_count": 1,
    }
    unfinished = counted([TOKENS, ended], ValueError("a bug"), indices=[0, 1])
    assert unfinished["requests_total{outcome=error}"] == 1
    assert "requests_total{outcome=length}" not in unfinished
