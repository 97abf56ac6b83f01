"""The drill itself, on a cluster of its own: several kinds of faults, and not a token harmed."""

import asyncio
from pathlib import Path

import pytest

from cluster.tools.drill.faults import FAULTS, LAST
from cluster.tools.drill.layout import configured
from cluster.tools.drill.run import DrillPlan
from cluster.tools.drill.session import Sizes, run_drill

pytestmark = [pytest.mark.ray, pytest.mark.wire]

KINDS = ("draft worker kill", "controller kill", "gateway kill", "engine kill")
RECOVERY_SECONDS = 180.0


def test_faults_under_eight_streams_break_none_and_change_no_token(target_folder: Path) -> None:
    """Each kind once, the head at last: every answer is what one engine alone says."""
    config = configured(str(target_folder), draft=None, tensor_parallel_size=1, tiny=True)
    plan = DrillPlan(
        kinds=(*(FAULTS[name] for name in KINDS), LAST),
        num_faults=len(KINDS) + 1,
        settle_seconds=0.1,
        last_seconds=3.0,
        recovery_seconds=RECOVERY_SECONDS,
    )
    outcome = asyncio.run(run_drill(config, plan, Sizes(max_tokens=300), num_streams=8))
    assert outcome.passed, (outcome.records, outcome.messages)
    assert [record.name for record in outcome.records][-1] == LAST.name
    assert sorted(record.name for record in outcome.records[:-1]) == sorted(KINDS)
    assert all(record.num_in_flight == 8 for record in outcome.records)
    assert all(
        record.counts.reconnected == 0 or record.name == "gateway kill"
        for record in outcome.records
    )
    assert outcome.counts.ended > 8
