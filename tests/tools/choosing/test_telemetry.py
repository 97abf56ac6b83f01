"""Facts from the very counters that engines and gateways have. No cluster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Histogram

from cluster.errors import ConfigurationError, Unavailable
from cluster.messages import EngineLoad, TokenDelta
from cluster.metrics import EngineMetrics, Family, GatewayMetrics, collect, render
from cluster.request import FinishReason
from cluster.tools.bench.progress import silent
from cluster.tools.choosing.facts import Place
from cluster.tools.choosing.telemetry import Page, facts_of, parse_page, watch
from cluster.tools.connection import Access

POOL = "small"


class Cluster:
    """Two engines, a gateway and a draft worker, as far as they count."""

    def __init__(self) -> None:
        self.registries = [CollectorRegistry() for _ in range(4)]
        self.engines = [
            EngineMetrics(registry, model="m", num_positions=4, drafters=("ngram", POOL))
            for registry in self.registries[:2]
        ]
        self.gateway = GatewayMetrics(self.registries[2], model="m")
        self.exchange = Histogram(
            "drafthouse_draft_exchange_seconds",
            "Seconds of an exchange.",
            ("model", "pool"),
            registry=self.registries[3],
        ).labels(model="m", pool=POOL)

    def work(self, num_steps: int) -> None:
        """Each engine steps so often with drafts of four, of which two are kept."""
        delta = TokenDelta(request_id="r", token_ids=(1, 2, 3), num_drafted=4, num_accepted=2)
        load = EngineLoad(
            running=3,
            waiting=1,
            free_blocks=2,
            step_id=1,
            max_num_seqs=8,
            base_seconds=0.02,
            row_seconds=0.001,
        )
        for engine in self.engines:
            engine.watch_load(lambda: load, num_blocks=8)
            for _ in range(num_steps):
                for phase, seconds in (("draft", 0.004), ("target", 0.03)):
                    engine._step_seconds[phase].observe(seconds)
                engine.count([(POOL, delta)])
                self.exchange.observe(0.003)

    def answer(self, num_tokens: int, num_prompt_tokens: int) -> None:
        """The gateway passes an answer on."""
        self.engines[0].admitted(
            waited_seconds=0.5, num_prompt_tokens=num_prompt_tokens, num_cached_tokens=0
        )
        tenant = self.gateway.of("")
        tenant.started(num_prompt_tokens=num_prompt_tokens)
        tenant.chunk(num_tokens=num_tokens, gap_seconds=0.1, first=True)
        tenant.ended(FinishReason.STOP, seconds=1.0)

    def page(self) -> bytes:
        """As the gateway shows it."""
        names = (("engine", "a"), ("engine", "b"), ("gateway", "g"), ("draft", "d"))
        families: dict[tuple[str, str], tuple[Family, ...]] = {
            name: collect(registry) for name, registry in zip(names, self.registries, strict=True)
        }
        return render(families)

    def taken(self, seconds: float) -> Page:
        """The page at a moment."""
        return parse_page(self.page().decode(), seconds=seconds)


def test_facts_are_what_was_counted_meanwhile() -> None:
    """Counters from page to page, gauges on average, each for one engine."""
    cluster = Cluster()
    cluster.work(50)
    cluster.answer(7, 7)
    first = cluster.taken(100.0)
    cluster.work(100)
    for _ in range(4):
        cluster.answer(40, 120)
    facts = facts_of([first, cluster.taken(110.0)])
    assert (facts.model, facts.num_engines, facts.max_num_seqs) == ("m", 2, 8)
    assert (facts.running, facts.waiting) == (3, 1)
    assert facts.queue_seconds == pytest.approx(0.5)
    assert facts.utilisation == pytest.approx(2 * 100 * 0.03 / 10 / 2)
    assert facts.step_seconds == pytest.approx(0.03)
    assert (facts.prompt_tokens, facts.answer_tokens) == (120, 40)
    assert facts.kv_usage == pytest.approx(0.75)
    assert facts.preemptions_per_request == 0
    assert facts.costs is not None
    assert facts.costs.floor_seconds == pytest.approx(0.021)
    assert facts.costs.seconds(100) == pytest.approx(0.12)


def test_drafters_are_told_apart() -> None:
    """Survival by position of those that drafted, and what a step waits, for who is waited for."""
    cluster = Cluster()
    cluster.work(100)
    ngram, small = facts_of([cluster.taken(1.0), cluster.taken(2.0)]).drafters
    assert (ngram.name, ngram.survival, ngram.place) == ("ngram", (), Place.IN_PROCESS)
    assert (ngram.wait_seconds, ngram.token_seconds) == (0, 0)
    assert (small.name, small.place, small.num_workers) == (POOL, Place.WORKERS, 1)
    assert small.survival == (1.0, 1.0, 0.0, 0.0)
    assert small.coverage == 1
    assert small.wait_seconds == pytest.approx(0.004)
    assert small.exchange_seconds == pytest.approx(0.003)


def test_a_quiet_cluster_is_judged_by_its_past() -> None:
    """Where nothing happens meanwhile all since the start counts, and no utilisation is claimed."""
    cluster = Cluster()
    cluster.work(10)
    facts = facts_of([cluster.taken(1.0), cluster.taken(2.0)])
    assert facts.utilisation is None
    assert facts.step_seconds == pytest.approx(0.03)


def test_a_cluster_that_never_stepped_has_no_costs() -> None:
    """Nothing is made up."""
    cluster = Cluster()
    facts = facts_of([cluster.taken(1.0)])
    assert (facts.costs, facts.step_seconds, facts.answer_tokens) == (None, None, None)
    assert all(each.survival == () for each in facts.drafters)


def test_other_pages_are_refused() -> None:
    """Neither what is no page nor a page of something else is taken for a cluster."""
    with pytest.raises(ConfigurationError, match="not a page of metrics"):
        parse_page("<html> 1 2 3 4", seconds=0.0)
    with pytest.raises(ConfigurationError, match="no engine"):
        facts_of([parse_page("up 1\n", seconds=0.0)])


@contextmanager
def http_server(page: bytes, *, key: str) -> Iterator[str]:
    """Shows a page to whoever has the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("authorization") == f"Bearer {key}"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(page if allowed else b"")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.wire
def test_pages_come_over_http() -> None:
    """With the key two pages at least; without it, or without a server, a typed error."""
    cluster = Cluster()
    cluster.work(3)
    with http_server(cluster.page(), key="k") as address:
        pages = watch(address, access=Access(api_key="k"), seconds=0.0, report=silent)
        assert len(pages) == 2
        assert facts_of(pages).running == 3
        with pytest.raises(Unavailable, match="401"):
            watch(address, access=Access(), seconds=0.0, report=silent)
    with pytest.raises(Unavailable, match="no server answers HTTP"):
        watch(address, access=Access(), seconds=0.0, report=silent)
    with pytest.raises(ConfigurationError, match="plaintext"):
        watch("example.org:1", access=Access(api_key="k"), seconds=0.0, report=silent)
