"""Keeps each tenant to its limits, and marks its requests as its own."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import cast

from cluster.control.quota import Quota
from cluster.errors import DeadlineExceeded, InvalidRequest
from cluster.messages import TokenDelta
from cluster.request import Request
from cluster.tenant import Tenant, TenantLimits

MAX_IDLE = 1024  # quotas of tenants that were seen and have used up nothing


class FairUse:
    """The use of one gateway's tenants. Requests of different limits are counted apart.

    Each of `num_gateways` lets a tenant have its part of what it may in all.
    """

    def __init__(
        self, *, num_gateways: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_gateways = num_gateways
        self._clock = clock
        self._quotas: dict[tuple[str, TenantLimits], Quota] = {}

    @contextmanager
    def admitted(
        self,
        tenant: Tenant,
        requests: Sequence[Request],
        *,
        deadline_seconds: float | None = None,
    ) -> Iterator["Admission"]:
        """The requests of one call, for as long as they run.

        `deadline_seconds` are those the caller still waits. Raises QuotaExceeded, DeadlineExceeded
        and InvalidRequest.
        """
        if deadline_seconds is not None and deadline_seconds <= 0:
            raise DeadlineExceeded("the deadline passed before the request was taken")
        own = tuple(owned(request, tenant, deadline_seconds) for request in requests)
        quota = self._quota(tenant)
        num_rows = sum(len(request.prompt_token_ids) for request in own)
        quota.admit(num_answers=len(own), num_rows=num_rows)
        try:
            yield Admission(quota, own)
        finally:
            quota.release(num_answers=len(own))

    def _quota(self, tenant: Tenant) -> Quota:
        key = tenant.name, tenant.limits
        if key not in self._quotas:
            if len(self._quotas) >= MAX_IDLE:
                busy = {key: quota for key, quota in self._quotas.items() if not quota.at_rest}
                self._quotas = busy
            self._quotas[key] = Quota(self._share(tenant.limits), clock=self._clock)
        return self._quotas[key]

    def _share(self, limits: TenantLimits) -> TenantLimits:
        """What of it is this gateway's."""
        parts = self._num_gateways
        most = limits.concurrent_requests
        return TenantLimits(
            concurrent_requests=None if most is None else -(-most // parts),
            requests_per_minute=_part(limits.requests_per_minute, parts),
            tokens_per_minute=_part(limits.tokens_per_minute, parts),
        )


class Admission:
    """One call's requests, as they go to an engine."""

    def __init__(self, quota: Quota, requests: tuple[Request, ...]) -> None:
        self._quota = quota
        self.requests = requests

    async def counted(self, deltas: AsyncIterator[TokenDelta]) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one of the requests, whose rows are counted as they come by.

        Closing this closes `deltas`, which is an async generator.
        """
        async with aclosing(cast("AsyncGenerator[TokenDelta, None]", deltas)):
            async for delta in deltas:
                self._quota.charge(rows_of(delta))
                yield delta


def rows_of(delta: TokenDelta) -> int:
    """Rows that a target computed for it beyond the prompt; less what of that it need not."""
    num_steps = delta.num_steps if delta.token_ids else 0
    return num_steps + delta.num_drafted - delta.num_cached_tokens


def owned(request: Request, tenant: Tenant, deadline_seconds: float | None) -> Request:
    """The request as the tenant's own. Raises InvalidRequest for a priority above what it may."""
    if request.priority > tenant.highest_priority:
        problem = f"{request.priority} is over the limit of {tenant.highest_priority}"
        raise InvalidRequest("priority", problem)
    return replace(
        request,
        tenant=tenant.name,
        weight=tenant.weight,
        priority=request.priority + tenant.priority,
        cache_salt=tenant.name,
        deadline_seconds=deadline_seconds,
    )


def _part(limit: float | None, parts: int) -> float | None:
    return None if limit is None else limit / parts
