"""Whichever way a request ends, it is counted once and as what it was."""

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import (
    DrafthouseError,
    InvalidRequest,
    Overloaded,
    TargetUnavailable,
    UnknownModel,
)
from cluster.metrics import GatewayMetrics
from cluster.request import FinishReason
from cluster.text.stream import TextDelta
from deployments.account import Account
from tests.harness import series

TOKENS = TextDelta(token_ids=(1, 2, 3))
LAST = TextDelta(token_ids=(4,), finish_reason=FinishReason.STOP)


def counted(deltas: list[TextDelta], error: BaseException | None) -> dict[str, float]:
    """What is not zero after the deltas and then the error."""
    registry = CollectorRegistry()
    with suppress(BaseException), Account(GatewayMetrics(registry, model="m")) as account:
        for delta in deltas:
            account.deliver(delta, num_prompt_tokens=7)
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
