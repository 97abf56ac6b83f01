"""A simulated cluster: nothing is lost in it, and it answers "what if" as it should."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import parse_config
from cluster.errors import ConfigurationError
from cluster.tools.simulation.cluster import SimulatedCluster, SimulationPlan
from cluster.tools.simulation.costs import read_cost
from cluster.tools.simulation.engines import Job, SimulatedEngine
from cluster.tools.simulation.guessing import LEVELS, Guesser, Situation, level_of
from cluster.tools.simulation.outcome import Outcome
from cluster.tools.simulation.traffic import read_traffic

WORKERS = {"kind": "model", "model": "draft", "num_replicas": 4}
SMALL = "prompt=40,output=30"


def play(
    trace: str,
    *,
    seed: int = 0,
    deadline: float | None = None,
    cost: str = "memory-bound",
    **sections: object,
) -> Outcome:
    """What comes of a trace on a cluster of that configuration."""
    plan = SimulationPlan(
        config=parse_config(sections),
        cost=read_cost(cost),
        start_seconds=5.0,
        deadline_seconds=deadline,
    )
    return SimulatedCluster(plan, read_traffic(trace, seed=seed)).run()


def targets(number: int, **fields: object) -> dict[str, object]:
    """A section of so many targets."""
    return {"num_replicas": number, "max_num_seqs": 8} | fields


@pytest.mark.parametrize(
    "trace", ["poisson:rate=200", "bursty:rate=200", "diurnal:rate=200,period=2"]
)
def test_every_request_is_served_or_refused(trace: str) -> None:
    """Under a load that is too high, with queues that are too short: their sum is the trace."""
    outcome = play(f"{trace},requests=300,{SMALL}", target=targets(2, max_num_waiting=4))
    assert outcome.num_refused > 0
    assert outcome.num_served + outcome.num_refused == outcome.num_requests == 300
    assert len(outcome.first_seconds) == outcome.num_served
    assert (outcome.first_seconds > 0).all()
    assert (outcome.token_seconds > 0).all()


def test_what_cannot_begin_in_time_is_refused() -> None:
    """A deadline bounds the wait of those that are taken in, about."""
    load = f"poisson:rate=40,requests=300,{SMALL}"
    patient = play(load, target=targets(1))
    hurried = play(load, target=targets(1), deadline=1.0)
    assert patient.num_refused == 0 < hurried.num_refused
    assert np.percentile(hurried.first_seconds, 90) < 2.0 < np.percentile(patient.first_seconds, 90)


def test_a_seed_makes_one_outcome() -> None:
    """Deterministic in all it tells, but for what was measured of this machine."""

    def told(seed: int) -> dict[str, object]:
        outcome = play(f"poisson:rate=10,requests=200,{SMALL}", seed=seed, drafter=WORKERS)
        return outcome.as_json() | {"slow_loop": None}

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_more_replicas_never_lower_goodput() -> None:
    """While there is more to do than they can."""
    goodputs = [
        play(f"poisson:rate=200,requests=400,{SMALL}", target=targets(number)).goodput
        for number in (1, 2, 4)
    ]
    assert goodputs[1] > 1.5 * goodputs[0]
    assert goodputs[2] > 1.3 * goodputs[1]


def test_drafts_raise_goodput_where_they_are_kept_and_cost_nothing_where_not() -> None:
    """The controller's arithmetic: deep where it pays, plain where nothing is accepted."""

    def goodput(drafter: dict[str, object], acceptance: float) -> Outcome:
        trace = f"poisson:rate=50,requests=150,acceptance={acceptance},{SMALL}"
        return play(trace, drafter=drafter, target=targets(1))

    off, ngram = {"kind": "off"}, {"kind": "ngram"}
    assert goodput(ngram, 0.8).goodput > 1.5 * goodput(off, 0.8).goodput
    hopeless = goodput(ngram, 0.0)
    assert hopeless.goodput == pytest.approx(goodput(off, 0.0).goodput)
    assert hopeless.mean_depth == 0


@pytest.mark.parametrize("begin", [0.0, 900.7, 1e6])
def test_an_engine_gives_every_request_its_tokens(begin: float) -> None:
    """One batch by hand: prompts one after the other, and each as many tokens as it asked for.

    Late in a trace the clock is too coarse for the least of distances, and still goes on.
    """
    limits = parse_config({"target": targets(1)}).target
    guesser = Guesser(read_cost("cpu-like"), cap=4, mean_context=50, fixed=False)
    engine = SimulatedEngine("one", guesser, limits, now=begin)
    jobs = [
        Job(index=index, arrived_at=begin, prompt=20, output=5 + index, level=level_of(0.6))
        for index in range(12)
    ]
    for job in jobs:
        engine.submit(job, now=begin)
    ended: list[Job] = []
    for _ in range(10 * len(jobs)):
        if engine.num_held:
            ended += engine.settle(now=engine.next_at)
    assert len(ended) == len(jobs)
    firsts = [job.first_at for job in jobs]
    assert firsts == sorted(firsts)
    assert engine.totals.tokens == pytest.approx(sum(job.output for job in jobs), rel=1e-5)
    assert engine.totals.accepted < engine.totals.drafts


def test_what_an_engine_hands_over_is_what_it_had_left() -> None:
    """Tokens so far become prompt: none is lost and none asked for twice."""
    limits = parse_config({"target": targets(1)}).target
    guesser = Guesser(read_cost("cpu-like"), cap=4, mean_context=50, fixed=False)
    engine = SimulatedEngine("one", guesser, limits, now=0.0)
    for index in range(10):
        job = Job(index=index, arrived_at=0.0, prompt=20, output=50, level=level_of(0.5))
        engine.submit(job, now=0.0)
    ended: list[Job] = []
    for _ in range(10):
        ended += engine.settle(now=engine.next_at)
    moved = engine.hand_over(now=engine.next_at)
    assert engine.num_held == 0
    assert sorted(job.index for job in (*ended, *moved)) == list(range(10))
    assert {job.prompt + job.output for job in moved} == {70}
    assert any(job.output < 50 for job in moved)


def test_a_guess_is_shallower_the_more_sequences_and_the_later_drafts() -> None:
    """What is offered and costs the same is worth less when most of it comes too late."""
    guesser = Guesser(read_cost("cpu-like"), cap=8, mean_context=50, fixed=False)

    def depth(number: int, **how: float) -> float:
        counts = [0] * (LEVELS + 1)
        counts[level_of(0.75)] = number
        guess = guesser.guess(Situation(counts=tuple(counts), prompt_rows=0, **how))
        return guess.drafts / number

    assert depth(1) > depth(8) > 0
    assert depth(2) > depth(2, late=10)
    assert depth(2, late=20) == 0
    assert depth(2) > depth(2, floor=0.5)
    assert depth(2, wait=40) == 0


def test_a_square_wave_scales_a_cluster_after_guessing_became_shorter() -> None:
    """X74 with the real parts: K first, then replicas, at most two changes an edge.

    The bursts are the first halves of periods of 600 s.
    """
    scaling = {"min_replicas": 2, "max_replicas": 12}
    delays = {"upscale_delay_seconds": 10.0, "downscale_delay_seconds": 60.0}
    outcome = play(
        f"bursty:rate=6,burst=2,period=600,requests=6400,{SMALL}",
        cost="cpu-like",
        target=targets(2),
        autoscaling={"target": scaling | delays},
    )
    assert outcome.num_served == 6400
    for edge in range(0, 1200, 300):
        changes = [each for each in outcome.changes if edge <= each.seconds < edge + 300]
        assert len(changes) <= 2, outcome.changes
    [first, *_] = [each for each in outcome.changes if each.seconds >= 600]
    before = [each.depth for each in outcome.timeline if 500 <= each.seconds < 600 and each.depth]
    until = [each.depth for each in outcome.timeline if 600 < each.seconds <= first.seconds]
    assert min(until) < 0.5 * np.mean(before)


def test_draft_workers_fall_to_the_fewest_when_nothing_is_accepted(tmp_path: Path) -> None:
    """And come back: a trace whose answers are first easy, then hopeless, then easy again."""
    lines = [
        {
            "arrival": index / 18,
            "prompt": 20,
            "output": 40,
            "acceptance": 0.0 if 120 <= index / 18 < 360 else 0.9,
        }
        for index in range(18 * 520)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    outcome = play(
        str(trace),
        target=targets(2),
        drafter=WORKERS,
        autoscaling={
            "drafts": {"min_replicas": 1, "max_replicas": 8, "downscale_delay_seconds": 60.0}
        },
    )

    def drafts(at: float) -> int:
        return next(each.drafts for each in outcome.timeline if each.seconds >= at)

    assert drafts(110) > 1
    assert drafts(350) == 1
    assert drafts(510) > 1


@pytest.mark.parametrize(
    ("trace", "field"),
    [
        ("poisson:speed=3", "speed"),
        ("poisson:rate=0", "rate"),
        ("poisson:rate=x", "rate"),
        ("diurnal:depth=2", "depth"),
        ("bursty:burst=0.5", "burst"),
        ("/nowhere.jsonl", "nowhere"),
    ],
)
def test_a_trace_that_cannot_be_is_an_error_that_names_the_field(trace: str, field: str) -> None:
    """Before anything is simulated."""
    with pytest.raises(ConfigurationError, match=field):
        read_traffic(trace)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"prompt": 1, "output": 1}, "arrival"),
        ({"arrival": 0, "prompt": 0, "output": 1}, "prompt"),
        ({"arrival": 0, "prompt": 1, "output": "9"}, "output"),
        ({"arrival": 0, "prompt": 1, "output": 1, "acceptance": 1.5}, "acceptance"),
        ({"arrival": 0, "prompt": 1, "output": 1, "tokens": 1}, "tokens"),
        ([0, 1, 1], "no JSON object"),
    ],
)
def test_a_line_that_cannot_be_is_an_error_that_names_it(
    line: object, field: str, tmp_path: Path
) -> None:
    """The file, the line and the field."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt": 1, "output": 1}\n' + json.dumps(line))
    with pytest.raises(ConfigurationError, match=f"line 2.*{field}"):
        read_traffic(str(trace))


def test_made_traffic_has_the_rate_that_was_asked_for() -> None:
    """On average; a burst has more, the rest a tenth."""
    for trace in ("poisson:rate=50", "bursty:rate=50,period=10", "diurnal:rate=50,period=20"):
        traffic = read_traffic(f"{trace},requests=20000")
        assert 20000 / traffic.arrivals[-1] == pytest.approx(50, rel=0.05)
        assert traffic.prompts.mean() == pytest.approx(300, rel=0.05)
    burst = read_traffic("bursty:rate=50,burst=5,period=10,requests=20000").arrivals % 10 < 2
    assert burst.mean() == pytest.approx(0.92, abs=0.02)


def test_the_command_prints_what_came_of_it(tmp_path: Path) -> None:
    """As JSON for programs and as a table for people, from a configuration file."""
    config = tmp_path / "config.yaml"
    config.write_text("target: {num_replicas: 2}\n")
    command = ["simulate", f"poisson:rate=1,requests=40,{SMALL}", "--config", str(config)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "40 / 0 / 0" in shown.output
    told = CliRunner().invoke(app, [*command, "--drafts", "2", "--json"])
    found = json.loads(told.stdout)
    assert found["served"] == 40
    assert found["draft_hours"] > 0
    assert found["slow_loop"]["rounds"] > 0
