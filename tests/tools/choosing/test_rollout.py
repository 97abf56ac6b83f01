"""`drafthouse rollout` against a real server whose target computes nothing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import ConfigurationError, Unavailable
from cluster.messages import SequenceRows, SequenceTokens, StepInput, StepOutput
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from cluster.tools.bench.progress import silent
from cluster.tools.choosing.canary import Decision
from cluster.tools.choosing.rollout import RolloutPlan, run_rollout
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeModel, FakeTarget
from tests.wire import Wire, served

STEP_SECONDS = 0.02  # long beside what a busy machine does in between
SHORT_SECONDS = 0.005
PROMPTS = ("ab", "cd", (ChatMessage(role="user", content="hi"),), "ef")


class SleepingTarget(FakeTarget):
    """Takes as long for every step, however many rows it has."""

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, later."""
        await asyncio.sleep(STEP_SECONDS)
        return await super().step(step)


class SteepTarget(FakeTarget):
    """Takes ten times as long for a step with drafts."""

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, later."""
        drafts = sum(rows.num_drafts for rows in step.sequences)
        await asyncio.sleep(SHORT_SECONDS * (10 if drafts else 1))
        return await super().step(step)


class ForgetfulTarget(FakeTarget):
    """Says something else where it verified drafts: what must never happen."""

    def _compute(self, rows: SequenceRows) -> SequenceTokens | None:
        answer = super()._compute(rows)
        if answer is None or not rows.num_drafts:
            return answer
        *first, last = answer.token_ids
        return replace(answer, token_ids=(*first, last % 200 + 10))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, without merges."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=259))


@asynccontextmanager
async def server(tokenizer: Tokenizer, target: type[FakeTarget]) -> AsyncIterator[Wire]:
    """A server whose drafts are all right."""
    async with served(
        tokenizer, model=lambda size, _: FakeModel(size), target=target, max_model_len=256
    ) as wire:
        yield wire


def plan(wire: Wire, **fields: Any) -> RolloutPlan:  # noqa: ANN401 - the plan's own
    """A short one."""
    usual: dict[str, Any] = {
        "address": f"127.0.0.1:{wire.port}",
        "prompts": PROMPTS,
        "shares": (0.5,),
        "num_requests": 24,
        "max_tokens": 20,
    }
    return RolloutPlan(**(usual | fields))


@pytest.mark.wire
async def test_drafts_that_pay_are_promoted(tokenizer: Tokenizer) -> None:
    """Exactly a share speculates; tokens are the same and come in less time; then for more."""
    async with server(tokenizer, SleepingTarget) as wire:
        found = await run_rollout(plan(wire, shares=(0.25, 0.5)), report=silent)
        asked = wire.backend.requests
    assert found.decision is Decision.PROMOTE
    assert [(len(stage.canary), len(stage.control)) for stage in found.stages] == [
        (6, 18),
        (12, 12),
    ]
    assert [request.speculation.enabled for request in asked[:4]] == [False] * 4
    assert sum(request.speculation.enabled for request in asked) == 18
    for stage in found.stages:
        assert stage.divergence.value == 0
        assert stage.acceptance_rate == 1
        assert all(each.num_drafted == 0 for each in stage.control)
        assert stage.token_time is not None
        assert stage.token_time.high < 0.9


@pytest.mark.wire
async def test_drafts_that_cost_return_at_the_first_share(tokenizer: Tokenizer) -> None:
    """What was shown to be slower goes no further; one at once: no neighbour pays for it."""
    async with server(tokenizer, SteepTarget) as wire:
        found = await run_rollout(plan(wire, shares=(0.5, 0.9), concurrency=1), report=silent)
    assert found.decision is Decision.RETURN
    assert len(found.stages) == 1
    assert any("time between tokens" in each for each in found.stages[0].objections())


@pytest.mark.wire
async def test_another_token_returns(tokenizer: Tokenizer) -> None:
    """A target that is not what it promises is found out, however fast it is."""
    async with server(tokenizer, ForgetfulTarget) as wire:
        found = await run_rollout(plan(wire), report=silent)
    [stage] = found.stages
    assert stage.must_be_same
    assert stage.divergence.value > 0.9
    assert stage.own_divergence.value == 0
    assert found.decision is Decision.RETURN


@pytest.mark.wire
async def test_the_command_says_it_all(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """JSON with intervals for programs; the exit status is the decision."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab", "cd")))
    options = ["--prompts", str(path), "--share", "0.5", "--num-requests", "16"]
    async with server(tokenizer, SleepingTarget) as wire:
        address = ["rollout", "--address", f"127.0.0.1:{wire.port}"]
        arguments = [*address, *options, "--max-tokens", "16"]
        good = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--json"])
        few = [*arguments, "--max-drafts", "1", "--num-requests", "2"]
        words = await asyncio.to_thread(CliRunner().invoke, app, few)
    found = json.loads(good.stdout)
    assert (good.exit_code, found["decision"]) == (0, "promote"), good.output
    [stage] = found["stages"]
    assert (stage["num_canary"], stage["num_control"]) == (8, 8)
    for name in ("token_time_ratio", "first_token_ratio", "throughput_ratio", "divergence"):
        assert stage[name]["low"] <= stage[name]["value"] <= stage[name]["high"]
    assert "time between tokens" in words.stdout
    assert "speculat" in words.stdout


async def test_what_cannot_be_compared_is_refused() -> None:
    """No server, no share and no requests, each by name."""
    gone = RolloutPlan(address="127.0.0.1:1", prompts=PROMPTS)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        await run_rollout(gone, report=silent)
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ConfigurationError, match="--share"):
            gone.assignment(share)
    with pytest.raises(ConfigurationError, match="--num-requests"):
        replace(gone, num_requests=1).assignment(0.5)


def test_a_share_is_exact_and_at_random() -> None:
    """So many, spread, the same for a seed, and neither none nor all."""
    some = RolloutPlan(address="a:1", prompts=PROMPTS, num_requests=200)
    chosen = some.assignment(0.1)
    assert sum(chosen) == 20
    assert 0 < sum(chosen[:100]) < 20
    assert chosen == some.assignment(0.1) != replace(some, seed=1).assignment(0.1)
    tiny = replace(some, num_requests=2)
    assert sum(tiny.assignment(0.01)) == sum(tiny.assignment(0.99)) == 1
