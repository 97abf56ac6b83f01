"""A real Prometheus on a live cluster of several nodes: what it is told is what was served."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray

from cluster.actors import session
from cluster.config import DrafthouseConfig
from protos import inference_pb2
from tests.cluster.harness import (
    PATIENCE_SECONDS,
    PROMPTS,
    Answer,
    Served,
    ask,
    client,
    message,
    until,
)
from tests.cluster.nodes import nodes, spread_config
from tests.monitoring.prometheus import Prometheus, scraping
from tests.monitoring.rules import panels, program, rules, variables

pytestmark = [pytest.mark.ray, pytest.mark.wire]

NUM_TOKENS = 150
ROUNDS = 4  # of load, and more until drafts have paid
WINDOW_SECONDS = 10.0
Answers = list[tuple[Answer, Any]]


def greedy(prompt: tuple[int, ...]) -> inference_pb2.GenerateRequest:
    """A request whose answer soon repeats itself, so that drafts pay."""
    wire = message(prompt, max_tokens=NUM_TOKENS)
    wire.sampling.temperature = 0
    return wire


def accepted(answers: Answers) -> int:
    """Draft tokens that are in them."""
    return sum(last.speculation.accepted for _, last in answers)


@pytest.fixture(scope="module")
def config(target_folder: Path) -> DrafthouseConfig:
    """Two engines that decide by themselves how far to guess, and answer everything twice."""
    spread = spread_config(target_folder).model_dump()
    return DrafthouseConfig.model_validate(
        spread
        | {
            "drafter": {"kind": "choice", "drafters": [{"kind": "ngram"}, spread["drafter"]]},
            "speculation": {"policy": "adaptive", "profile": False},
            "observability": {"probe_share": 1.0, "log_format": "json"},
        }
    )


@pytest.fixture(scope="module")
def served(config: DrafthouseConfig) -> Iterator[Served]:
    """The application on all nodes."""
    program("prometheus")
    with nodes(config):
        gateway = session.deploy(config)
        port = session.await_ready(gateway, progress=lambda _: None)
        host = config.gateway.host
        served = Served(config, f"{host}:{port}", f"{host}:{config.gateway.http_port}")
        until(lambda: served.total("drafthouse_members", kind="target") == 2)
        until(lambda: served.total("drafthouse_members", kind="draft") == 1)
        yield served


@pytest.fixture(scope="module")
def prometheus(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped once before the first request."""
    with scraping(served.http, tmp_path_factory.mktemp("prometheus")) as prometheus:
        until(lambda: prometheus.value("count(drafthouse_kv_usage_ratio)") == 2)
        yield prometheus


@pytest.fixture(scope="module")
def before(prometheus: Prometheus) -> dict[str, float]:
    """Every series of ours, by its labels, before the first request."""
    return {
        json.dumps(labels, sort_keys=True): value
        for labels, value in prometheus.query('{__name__=~"drafthouse_.*_total"}')
    }


@pytest.fixture(scope="module")
def answers(before: dict[str, float], served: Served) -> Answers:
    """What load brought, with a request in between that is refused."""
    del before

    async def load() -> Answers:
        found: Answers = []
        async with client(served) as stub:
            end = time.monotonic() + PATIENCE_SECONDS
            while len(found) < ROUNDS * len(PROMPTS) or not accepted(found[-len(PROMPTS) :]):
                assert time.monotonic() < end, "drafts never pay"
                calls = (ask(stub, greedy(prompt)) for prompt in PROMPTS)
                found += await asyncio.gather(*calls)
                with pytest.raises(grpc.aio.AioRpcError):
                    await ask(stub, message([3] * 2000))
        return found

    return asyncio.run(load())


def test_every_panel_and_rule_has_data(
    answers: Answers, before: dict[str, float], prometheus: Prometheus
) -> None:
    """No query is empty or cannot be evaluated; nothing is alarmed about a healthy cluster."""
    assert answers
    queries = [
        (f"{title} {place}", query)
        for title, asked in panels().items()
        for place, query in enumerate(asked)
    ]
    queries += [(name, query) for name, query in rules().items() if ":" in name]
    missing = dict(queries)

    end = time.monotonic() + WINDOW_SECONDS  # the last scrape may be older than the last answer
    while missing and time.monotonic() < end:
        for where, query in list(missing.items()):
            if any(math.isfinite(value) for _, value in prometheus.query(query)):
                del missing[where]
        time.sleep(0.5)
    assert not missing
    for name, selector in variables().items():
        assert all(name in labels for labels in prometheus.series(selector)), name
        assert prometheus.series(selector), name
    assert not prometheus.failed_rules()
    assert not prometheus.firing()
    now = {
        json.dumps(labels, sort_keys=True): value
        for labels, value in prometheus.query('{__name__=~"drafthouse_.*_total"}')
    }
    assert before.keys() <= now.keys()
    assert all(before[series] <= now[series] for series in before)


def test_x61_billed_is_streamed_is_counted(
    answers: Answers, before: dict[str, float], served: Served, prometheus: Prometheus
) -> None:
    """Tokens of usage, of the streams and of the counters, through gateway, engines and page."""
    usages = [last.usage for _, last in answers]
    stats = [last.speculation for _, last in answers]
    streamed = sum(len(answer.token_ids) for answer, _ in answers)
    rounds = len(answers) // len(PROMPTS)
    expected = {
        "drafthouse_generation_tokens_total": streamed,
        "drafthouse_prompt_tokens_total": rounds * sum(map(len, PROMPTS)),
        "drafthouse_cached_prompt_tokens_total": sum(usage.cached_tokens for usage in usages),
        'drafthouse_requests_total{outcome="length"}': len(answers),
        'drafthouse_requests_total{outcome="refused"}': rounds,
        "drafthouse_spec_decode_num_draft_tokens_total": sum(each.drafted for each in stats),
        "drafthouse_spec_decode_num_accepted_tokens_total": accepted(answers),
        "drafthouse_spec_decode_num_accepted_tokens_per_pos_total": accepted(answers),
        "drafthouse_spec_decode_num_wasted_tokens_total": sum(
            each.drafted - each.accepted for each in stats
        ),
    }
    assert streamed == sum(usage.completion_tokens for usage in usages)
    assert streamed == len(answers) * NUM_TOKENS
    for name, value in expected.items():
        until(lambda name=name, value=value: prometheus.value(f"sum({name})") == value)
    assert {dict(labels)["tenant"] for labels in served.metrics()["drafthouse_requests_total"]}
    assert not any(before[series] for series in before if "drafthouse_generation" in series)


def test_answers_are_given_again_without_drafts_and_are_the_same(
    answers: Answers, prometheus: Prometheus
) -> None:
    """On the same engines, with logprobs, and in no user's counts (the test above)."""
    assert answers
    until(lambda: (prometheus.value("sum(drafthouse_losslessness_probes_total)") or 0) >= ROUNDS)
    assert prometheus.value("sum(drafthouse_losslessness_divergences_total)") == 0


def test_the_gateways_log_has_a_line_for_each_request(answers: Answers) -> None:
    """JSON, in the files where Ray keeps what processes write."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    lines = [
        json.loads(line)
        for path in folder.glob("worker-*.err")
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith('{"time"')
    ]
    ended = [line for line in lines if line.get("ended") == "length"]
    assert len({line["request_id"] for line in ended}) == len(ended) == len(answers)
    assert {line["completion_tokens"] for line in ended} == {NUM_TOKENS}
    assert all(line["process"].startswith("gateway-") for line in ended)
