"""The rule of `speculation.verification` reaches all that has to keep it, as engines are built."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster.actors.engine import _remote_drafters
from cluster.actors.remote_drafter import RemoteDrafter
from cluster.config import DrafthouseConfig, draft_models, parse_config
from cluster.control.adaptive import AdaptivePolicy
from cluster.drafters.ahead import DraftThread
from cluster.local import build_engine
from cluster.local_drafter import build_draft_model
from cluster.messages import Rule, StepInput, StepOutput
from cluster.worker import TargetWorker
from tests.actors.fake_ray import FakeHandle
from tests.conformance.lab import VOCAB_SIZE, DraftProcess
from tests.harness import SAMPLED, ask, make_request, running
from tests.heads import make_eagle, make_medusa

pytestmark = pytest.mark.usefixtures("one_thread")

every_rule = pytest.mark.parametrize("rule", Rule)


@pytest.fixture(scope="module")
def drafters(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, object]]:
    """The section `drafter`, for every kind that draws from distributions."""
    folder = tmp_path_factory.mktemp("heads")
    target, sibling = checkpoints["target"], str(checkpoints["sibling"])
    own = {"kind": "model", "model": sibling, "placement": "in_process", "max_model_len": 256}
    medusa = {"kind": "medusa", "model": str(make_medusa(folder / "medusa", target))}
    skip = {"kind": "skip", "skip_layers": [1]}
    return {
        "model": own,
        "worker": own | {"placement": "worker"},
        "medusa": medusa,
        "eagle": {"kind": "eagle", "model": str(make_eagle(folder / "eagle", target))},
        "skip": skip,
        "choice": {"kind": "choice", "drafters": [own, medusa, skip]},
    }


def config_of(
    checkpoints: dict[str, Path], drafter: object, rule: Rule, **speculation: object
) -> DrafthouseConfig:
    """As it is read from a file."""
    return parse_config(
        {
            "target": {
                "model": str(checkpoints["target"]),
                "max_model_len": 256,
                "max_num_seqs": 4,
                "num_threads": 1,
            },
            "drafter": drafter,
            "speculation": {"verification": str(rule), "profile": False} | speculation,
        }
    )


def remote_drafters(config: DrafthouseConfig, stack: ExitStack) -> dict[str, RemoteDrafter]:
    """As an engine's process makes them, with a worker in this process for each."""
    drafters = _remote_drafters(config, engine_id="engine")
    for model in draft_models(config.drafter):
        if model.pool in drafters:
            draft_model = build_draft_model(model, vocab_size=VOCAB_SIZE)
            thread = DraftThread(draft_model, run_ahead=model.drafts_ahead)
            handle = FakeHandle(DraftProcess(thread))
            stack.callback(thread.close)
            stack.callback(handle.kill)
            drafters[model.pool].set_workers({"worker": handle})
    return drafters


@every_rule
@pytest.mark.parametrize("kind", ["model", "worker", "medusa", "eagle", "skip", "choice"])
async def test_drafts_bring_distributions_where_the_target_verifies_by_ratio(
    checkpoints: dict[str, Path],
    drafters: dict[str, dict[str, object]],
    kind: str,
    rule: Rule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampled requests: every step says the rule, every draft its distributions, or none has any.

    That a drafter in a worker is told of the rule can be seen by this alone.
    """
    steps: list[StepInput] = []
    monkeypatch.setattr(TargetWorker, "step", watched(TargetWorker.step, steps))
    config = config_of(checkpoints, drafters[kind], rule, policy="fixed", num_speculative_tokens=3)
    with ExitStack() as stack:
        local = build_engine(
            config, registry=CollectorRegistry(), remote_drafters=remote_drafters(config, stack)
        )
        asked = [
            make_request([5, 6, 7 + i], request_id=str(i), sampling=SAMPLED, max_tokens=16)
            for i in range(3)
        ]
        async with running(local.engine) as engine:
            await ask(engine, asked)
        await local.close()
    assert local.info.verification == rule
    assert {step.rule for step in steps} == {rule}
    drafted = [rows for step in steps for rows in step.sequences if rows.num_drafts]
    assert drafted
    for rows in drafted:
        num_expected = rows.num_drafts if rule is Rule.RATIO else 0
        assert len(rows.draft_distributions) == num_expected


def watched(
    step: Callable[[TargetWorker, StepInput], StepOutput], steps: list[StepInput]
) -> Callable[[TargetWorker, StepInput], StepOutput]:
    """The same step, which is also kept."""

    def watching(worker: TargetWorker, message: StepInput) -> StepOutput:
        steps.append(message)
        return step(worker, message)

    return watching


@every_rule
def test_the_adaptive_policy_expects_to_cut_drafts_only_where_it_may(
    checkpoints: dict[str, Path], drafters: dict[str, dict[str, object]], rule: Rule
) -> None:
    """Under the ratio rule whatever comes is verified, and paid for."""
    config = config_of(checkpoints, drafters["skip"], rule)
    local = build_engine(config, registry=CollectorRegistry())
    policy = local.engine._policy
    assert isinstance(policy, AdaptivePolicy)
    assert policy._trims == (rule is Rule.COUPLED)
    asyncio.run(local.close())
