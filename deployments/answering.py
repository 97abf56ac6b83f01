"""One call for answers, whatever it came by: read, admitted, answered, counted."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from cluster.errors import Unavailable, UnknownModel
from cluster.metrics import GatewayMetrics
from cluster.request import Request
from cluster.tenant import ANYONE, Tenant
from cluster.text.stream import TextDelta, TextStream, stream_text
from cluster.text.tokenizer import Tokenizer
from deployments.account import Account
from deployments.answers import Answers, interleaved
from deployments.backend import Backend
from deployments.fair_use import Admission, FairUse

logger = logging.getLogger(__name__)


class Answering:
    """Answers calls with a backend, each within what its tenant may."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        fair_use: FairUse | None = None,
    ) -> None:
        self.backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._fair_use = fair_use or FairUse()

    async def deltas(
        self,
        read: Callable[[], Awaitable[tuple[Request, ...]]],
        *,
        tenant: Tenant = ANYONE,
        deadline_seconds: Callable[[], float | None] = lambda: None,
    ) -> AsyncGenerator[tuple[int, TextDelta, Answers], None]:
        """The text deltas of all answers, each with its answer's place, and all answers so far.

        `read` brings the call's requests, one for each answer, and may raise. `deadline_seconds`
        are those for which the caller still waits. Everything is counted. Raises DrafthouseError.
        """
        with Account(self._metrics) as account:
            account.tenant = tenant.name
            check_served(self.backend.describe().name, tenant)
            requests = await read()
            if not self.backend.ready():
                raise Unavailable("no target is ready yet")
            deadline = deadline_seconds()
            with self._fair_use.admitted(tenant, requests, deadline_seconds=deadline) as admission:
                logger.debug("request %s begins", requests[0].request_id)
                answers = Answers(requests)
                streams = [self._stream(admission, request) for request in admission.requests]
                async with aclosing(interleaved(streams)) as deltas:
                    async for index, delta in deltas:
                        answers.each[index].add(delta)
                        account.deliver(index, delta, answers)
                        yield index, delta, answers

    def _stream(self, admission: Admission, request: Request) -> AsyncGenerator[TextDelta, None]:
        """One answer's text deltas."""
        stream = TextStream(self._tokenizer.vocabulary, request.stopping)
        return stream_text(admission.counted(self.backend.generate(request)), stream)


def check_served(model: str, tenant: Tenant) -> None:
    """Raises UnknownModel where the tenant may not ask it, as if it were not here."""
    if not tenant.may_ask(model):
        raise UnknownModel(model, ())
