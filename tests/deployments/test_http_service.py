"""What the gateway answers over HTTP beside OpenAI's API."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import Unauthenticated
from cluster.tenant import ANYONE, Tenant
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from deployments.auth import Authenticator
from deployments.http_service import build_http_app
from tests.checkpoints import make_tokenizer
from tests.openai_http import service_of
from tests.wire import served


async def page() -> bytes:
    """A page of metrics."""
    return b"metric 1\n"


class OneKey(Authenticator):
    """Knows one key."""

    def tenant_of(self, authorization: str | None) -> Tenant:
        """As the real one's."""
        if authorization != "Bearer good":
            raise Unauthenticated("unknown")
        return ANYONE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


async def test_health_is_open_and_metrics_are_for_those_with_a_key(tokenizer: Tokenizer) -> None:
    """Probes have no key; the page may need one, and one header that is valid."""
    async with served(tokenizer) as wire:
        openai = service_of(wire, tokenizer, CollectorRegistry(), Authenticator())
        for authenticator, refused in ((Authenticator(), 200), (OneKey(), 401)):
            ready = True
            app = build_http_app(
                lambda: ready,  # noqa: B023 - it is called in this turn of the loop
                page,
                openai,
                authenticator,
            )
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
                assert (await client.get("/metrics")).status_code == refused
                good = [("Authorization", "Bearer good")]
                shown = await client.get("/metrics", headers=good)
                assert (shown.status_code, shown.text) == (200, "metric 1\n")
                twice = await client.get("/metrics", headers=good * 2)
                assert twice.status_code == refused
                assert (await client.get("/health")).text == "SERVING\n"
                ready = False
                assert (await client.get("/health")).status_code == 503
