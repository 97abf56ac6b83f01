"""Every series operators were promised is there at zero, and its labels stay few."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from cluster.control.metrics import PolicyMetrics
from cluster.engine.proposer import Proposer
from cluster.errors import DrafterUnavailable, Unauthenticated
from cluster.interfaces import DraftQuery
from cluster.messages import EngineLoad, SamplingSpec, TokenDelta
from cluster.metrics import EngineMetrics, GatewayMetrics, collect, render
from cluster.metrics.gateway import KEY_FAILURES, MAX_TENANTS, NO_TENANT
from cluster.metrics.series import Few
from tests.fakes import DyingDrafter, FakeModel
from tests.harness import series

PROMISED = [
    "requests_total",
    "queue_seconds_count",
    "time_to_first_token_seconds_count",
    "inter_token_seconds_count",
    "delivery_seconds_count",
    "request_seconds_count",
    "prompt_tokens_total",
    "cached_prompt_tokens_total",
    "generation_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_wasted_tokens_total",
    "spec_price",
    "goodput_tokens_per_second",
    "calibration_error",
    "policy_changes_total",
    "drafts_late_total",
    "drafter_unavailable_total",
    "step_seconds_count",
    "kv_usage_ratio",
    "sequences",
    "failovers_total",
    "losslessness_divergences_total",
    "losslessness_probes_total",
    "authentication_failures_total",
]


def test_x61_all_that_was_promised_is_there_at_zero() -> None:
    """Before the first request, from the three things that count; one metric for each name."""
    registry = CollectorRegistry()
    EngineMetrics(registry, model="a b", num_positions=2, drafters=("ngram", "small"))
    PolicyMetrics(registry, model="a b")
    GatewayMetrics(registry, model="a b", tenants=("t",))
    samples = [sample for family in collect(registry) for sample in family.samples]
    for name in PROMISED:
        mine = [sample for sample in samples if sample[0] == f"drafthouse_{name}"]
        assert mine, name
        assert all(value == 0 for _, _, value in mine)
        assert all(labels["model"] == "a b" for _, labels, _ in mine)
    drafters = {labels["drafter"] for name, labels, _ in samples if "spec_decode" in name}
    tenants = {labels["tenant"] for name, labels, _ in samples if "house_requests_total" in name}
    assert (drafters, tenants) == ({"ngram", "small"}, {NO_TENANT, "t"})
    page = render({("gateway", "g1"): collect(registry), ("gateway", "g2"): collect(registry)})
    assert page.decode().count("# TYPE drafthouse_requests_total counter") == 1


def test_tenants_beyond_the_first_are_counted_together() -> None:
    """A thousand tenants make no thousand series; who has a name keeps it, and nothing is lost."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, model="m")
    for round_trip in range(2):
        for number in range(1000):
            metrics.of(f"tenant-{number}").started(num_prompt_tokens=1 + round_trip)
    [family] = [each for each in collect(registry) if each.name == "drafthouse_prompt_tokens"]
    counts = {
        labels["tenant"]: value for name, labels, value in family.samples if name.endswith("_total")
    }
    assert len(counts) == MAX_TENANTS + 2  # those without a tenant, and all others
    assert counts["tenant-0"] == counts[f"tenant-{MAX_TENANTS - 1}"] == 3
    assert counts["other"] == 3 * (1000 - MAX_TENANTS)
    assert sum(counts.values()) == 3000


def test_a_value_is_called_the_same_for_ever() -> None:
    """Whoever came first, and the empty value is not among those that are counted."""
    few = Few(2, unnamed="none")
    assert [few.name(value) for value in ("", "a", "b", "c", "a", "", "c")] == [
        "none",
        "a",
        "b",
        "other",
        "a",
        "none",
        "other",
    ]


def test_drafts_are_counted_under_who_made_them() -> None:
    """Accepted and wasted are drafted; a name that is not configured makes no new series."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model="m", num_positions=4, drafters=("ngram", "small"))
    delta = TokenDelta(request_id="r", token_ids=(1, 2, 3), num_drafted=4, num_accepted=2)
    metrics.count([("small", delta), ("liar", replace(delta, num_accepted=0))])
    counts = {
        (labels["drafter"], name.removeprefix("drafthouse_spec_decode_num_")): value
        for family in collect(registry)
        for name, labels, value in family.samples
        if "spec_decode" in name and "position" not in labels
    }
    assert {key: value for key, value in counts.items() if value and "created" not in key[1]} == {
        ("small", "drafts_total"): 1,
        ("small", "draft_tokens_total"): 4,
        ("small", "accepted_tokens_total"): 2,
        ("small", "wasted_tokens_total"): 2,
        ("ngram", "drafts_total"): 1,
        ("ngram", "draft_tokens_total"): 4,
        ("ngram", "wasted_tokens_total"): 4,
    }


def test_kv_usage_is_a_part_of_all_blocks() -> None:
    """What sequences use; blocks that are only kept for their tokens are free."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model="m", num_positions=1)
    load = EngineLoad(running=2, waiting=1, free_blocks=6, step_id=9)
    metrics.watch_load(lambda: load, num_blocks=8)
    assert series(registry)["drafthouse_kv_usage_ratio"] == pytest.approx(0.25)
    assert series(registry)["drafthouse_sequences{state=waiting}"] == 1


@pytest.mark.parametrize(("error", "expected"), [("late", 3), ("died", 0)])
async def test_a_late_step_is_late_for_each_of_its_sequences(error: str, expected: int) -> None:
    """Whether the drafter says so or is given up; a drafter that is gone is not late."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model="m", num_positions=1)
    drafter = DyingDrafter(FakeModel(), survives=0, error=DrafterUnavailable(error))
    proposer = Proposer(drafter, deadline_seconds=1.0, vocab_size=32, metrics=metrics)
    queries = [
        DraftQuery(seq_id=n, token_ids=[1, 2], num_wanted=2, sampling=SamplingSpec(seed=0))
        for n in range(3)
    ]
    assert await proposer.propose(queries) == {}
    assert series(registry)["drafthouse_drafts_late_total"] == expected


def test_every_reason_a_key_is_refused_for_is_counted() -> None:
    """The reasons are those that the error knows, and one that is new fails here first."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, model="m")
    for reason in KEY_FAILURES:
        metrics.key_refused(Unauthenticated(reason).reason)
    counted = series(registry)
    assert all(
        counted[f"drafthouse_authentication_failures_total{{reason={reason}}}"] == 1
        for reason in KEY_FAILURES
    )
    with pytest.raises(KeyError):
        Unauthenticated("another")
