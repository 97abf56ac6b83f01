"""What a tenant may have, on a clock of the test's own."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.quota import Quota
from cluster.errors import DeadlineExceeded, InvalidRequest, QuotaExceeded
from cluster.messages import TokenDelta
from cluster.request import FinishReason
from cluster.tenant import ANYONE, Tenant, TenantLimits
from deployments.fair_use import FairUse, rows_of
from tests.harness import make_request


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def refusal(quota: Quota, *, num_answers: int = 1, num_rows: int = 1) -> QuotaExceeded | None:
    """Why a request is not admitted, if it is not."""
    try:
        quota.admit(num_answers=num_answers, num_rows=num_rows)
    except QuotaExceeded as error:
        return error
    return None


@given(
    st.floats(1, 1000),
    st.lists(st.tuples(st.floats(0, 90), st.integers(0, 400)), max_size=60),
)
def test_no_more_requests_than_the_rate_allows(
    per_minute: float, moves: list[tuple[float, int]]
) -> None:
    """In t minutes at most rate * (t + 1), at least 1; and what is refused costs nothing."""
    clock = Clock()
    quota = Quota(TenantLimits(requests_per_minute=per_minute), clock=clock)
    admitted = 0
    for seconds, tries in moves:
        clock.now += seconds
        admitted += sum(refusal(quota) is None for _ in range(tries))
        assert admitted <= max(per_minute, 1) + per_minute * clock.now / 60 + 1e-6


@given(
    st.floats(10, 5000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 300)), max_size=60),
)
def test_rows_stay_within_the_rate_but_for_one_request(
    per_minute: float, moves: list[tuple[float, int]]
) -> None:
    """One at a time: no more rows than rate * (t + 1) and those of the request admitted last."""
    clock = Clock()
    quota = Quota(TenantLimits(tokens_per_minute=per_minute), clock=clock)
    used = 0
    for seconds, num_rows in moves:
        clock.now += seconds
        if refusal(quota, num_rows=num_rows) is None:
            assert used <= per_minute * (1 + clock.now / 60)
            quota.charge(2 * num_rows)
            used += 3 * num_rows
            quota.release(num_answers=1)


@given(st.floats(0.5, 1000), st.floats(0.5, 1000), st.integers(0, 2000))
def test_who_comes_back_when_told_is_admitted(
    requests: float, tokens: float, num_rows: int
) -> None:
    """`retry_seconds` is neither too early nor more than it takes."""
    clock = Clock()
    limits = TenantLimits(requests_per_minute=requests, tokens_per_minute=tokens)
    quota = Quota(limits, clock=clock)
    while (refused := refusal(quota, num_rows=num_rows)) is None:
        num_rows += 1
    for _ in range(2):  # one limit after the other
        assert refused is not None
        assert refused.retry_seconds > 0
        clock.now += refused.retry_seconds * 0.99 - 1e-6
        assert refusal(quota) is not None
        clock.now += refused.retry_seconds * 0.01 + 1e-3
        refused = refusal(quota)
        if refused is None:
            return
    pytest.fail("two waits were not enough")


def test_so_many_at_once_and_not_one_more() -> None:
    """Each answer of a request counts, and its place is free again when it has ended."""
    quota = Quota(TenantLimits(concurrent_requests=3), clock=Clock())
    quota.admit(num_answers=2, num_rows=5)
    refused = refusal(quota, num_answers=2)
    assert refused is not None
    assert (refused.limit, refused.allowed) == ("concurrent requests", 3)
    quota.admit(num_answers=1, num_rows=5)
    quota.release(num_answers=2)
    quota.admit(num_answers=2, num_rows=5)
    with pytest.raises(InvalidRequest, match="num_answers"):
        quota.admit(num_answers=4, num_rows=5)
    assert quota.num_running == 3


def test_rejected_drafts_count_and_cached_tokens_do_not() -> None:
    """A step costs a row and a row for each draft; a cached prompt token was no row."""
    step = TokenDelta(request_id="a", token_ids=(1, 2), num_drafted=4, num_accepted=1)
    assert rows_of(step) == 5
    assert rows_of(replace(step, num_cached_tokens=30)) == -25
    assert rows_of(TokenDelta(request_id="a", finish_reason=FinishReason.ABORT)) == 0


async def test_a_call_pays_for_what_it_was_given_and_then_lets_go() -> None:
    """The prompt at once, the rest as it comes; the place is free however the call ends."""
    clock = Clock()
    fair_use = FairUse(clock=clock)
    limits = TenantLimits(concurrent_requests=1, tokens_per_minute=60.0)
    tenant = Tenant(name="acme", limits=limits)
    request = make_request(range(1, 11))

    async def deltas():  # noqa: ANN202 - an async generator
        yield TokenDelta(request_id="request", token_ids=(1,), num_drafted=49, num_cached_tokens=4)
        yield TokenDelta(request_id="request", token_ids=(1,), num_drafted=29)

    with fair_use.admitted(tenant, [request]) as admission:
        with pytest.raises(QuotaExceeded, match="concurrent"), fair_use.admitted(tenant, [request]):
            pass
        assert [delta async for delta in admission.counted(deltas())]
    with (
        pytest.raises(QuotaExceeded, match="tokens") as raised,
        fair_use.admitted(tenant, [request]),
    ):
        pass
    assert raised.value.retry_seconds == pytest.approx(10 - 4 + 50 + 30 - 60 + 1)
    other = Tenant(name="other", limits=limits)
    with fair_use.admitted(other, [request]):  # has all of its own
        pass


def test_requests_are_marked_as_the_tenants_own() -> None:
    """Name, weight, salt, class and deadline; what a request asks is added to its class."""
    tenant = Tenant(name="acme", priority=5, weight=3.0)
    request = replace(make_request([1]), priority=-2)
    with FairUse().admitted(tenant, [request], deadline_seconds=2.0) as admission:
        [own] = admission.requests
    assert (own.tenant, own.weight, own.cache_salt) == ("acme", 3.0, "acme")
    assert (own.priority, own.deadline_seconds) == (3, 2.0)
    for late in (0.0, -1.0):
        with (
            pytest.raises(DeadlineExceeded),
            FairUse().admitted(tenant, [request], deadline_seconds=late),
        ):
            pass
    urgent = replace(request, priority=1)
    with pytest.raises(InvalidRequest, match="priority: 1 is over the limit of 0"):
        FairUse().admitted(tenant, [urgent]).__enter__()
    with FairUse().admitted(ANYONE, [urgent]) as admission:
        assert admission.requests[0].priority == 1


def test_gateways_share_a_tenants_limits() -> None:
    """Of four gateways each allows a quarter, and at least one request at a time."""
    fair_use = FairUse(num_gateways=4, clock=Clock())
    tenant = Tenant(name="acme", limits=TenantLimits(requests_per_minute=8.0))
    request = make_request([1])
    for _ in range(2):
        with fair_use.admitted(tenant, [request]):
            pass
    with pytest.raises(QuotaExceeded), fair_use.admitted(tenant, [request]):
        pass
