"""A draft worker by itself, as `drafthouse bench control --part a --way worker` measures it."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from cluster.actors.alone import lone_ray
from cluster.actors.remote_drafter import TIDY_SECONDS
from cluster.cli import app
from cluster.control.policy import FixedPolicy
from cluster.engine.engine import Engine
from cluster.messages import TokenDelta
from cluster.tools.bench.orchestration import WAYS, Way, settings
from cluster.tools.bench.steady import is_true, timed_engine, timed_request
from tests.cluster.harness import processes, until

pytestmark = pytest.mark.ray

STEP_SECONDS = 0.005
NUM_TOKENS = 100


async def test_its_drafts_are_verified_and_only_the_targets_tokens_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In both settings of the measurement: the timed target's own tokens, and drafts among them.

    Its process ends with it, and nobody asks for it afterwards.
    """
    with lone_ray():
        for setting in settings(STEP_SECONDS):
            policy = FixedPolicy(setting.num_speculative_tokens)
            size = setting.num_sequences
            async with (
                WAYS[Way.WORKER](setting) as drafting,
                timed_engine(setting.target, drafting.drafter, policy, max_num_seqs=size) as engine,
            ):
                assert drafting.round_trip > 0
                answers = await asyncio.gather(*(answer(engine, number) for number in range(size)))
            assert sum(delta.num_accepted for deltas in answers for delta in deltas) > 0
            await asyncio.to_thread(until, lambda: not processes("ray::LoneDraftWorker"))
    await asyncio.sleep(2 * TIDY_SECONDS)
    assert {record.name for record in caplog.records} <= {"cluster.engine.proposer"}  # late once


async def answer(engine: Engine, number: int) -> list[TokenDelta]:
    """All of one answer, which is the timed target's own."""
    request = timed_request(number, max_tokens=NUM_TOKENS)
    deltas = [delta async for delta in engine.generate(request)]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert len(token_ids) == NUM_TOKENS
    assert is_true(request, token_ids)
    return deltas


def test_the_command_measures_it() -> None:
    """It ends, finds every token the target's, and has a row for each setting."""
    result = CliRunner().invoke(
        app,
        [
            *("bench", "control", "--part", "a", "--way", "worker"),
            *("--step-ms", "5", "--seconds", "0.5", "--json"),
        ],
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["timed"]
    assert [(row["way"], row["num_speculative_tokens"]) for row in rows] == [
        ("worker", each.num_speculative_tokens) for each in settings(STEP_SECONDS)
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)
