"""Conformance on a fake target: a cancel at any moment stops its request and nothing else."""

import asyncio
from collections.abc import Callable

import pytest

from cluster.interfaces import DraftQuery
from cluster.messages import StepInput
from cluster.request import FinishReason
from tests.fakes import FakeModel, SameDrafter
from tests.harness import (
    Recorder,
    check_same,
    make_engine,
    make_fake_target,
    make_limits,
    make_request,
    reference,
    running,
)

MODEL = FakeModel()


class Interrupted(SameDrafter):
    """Calls `during_draft` while it proposes."""

    def __init__(self, model: FakeModel, during_draft: Callable[[DraftQuery], None]) -> None:
        super().__init__(model)
        self._during_draft = during_draft

    def draft(self, query: DraftQuery) -> list[int]:
        """The truth, but meanwhile the client has gone."""
        self._during_draft(query)
        return list(super().draft(query))


@pytest.mark.parametrize("phase", ["queued", "prefill", "drafting", "verifying", "last token"])
async def test_x70_a_cancel_in_any_phase_ends_within_a_step_and_leaves_nothing(phase: str) -> None:
    """The last delta at once; blocks, places and draft state back; neighbours do not notice."""
    limits = make_limits(max_num_seqs=2, max_num_batched_tokens=16)
    cancelled_at: list[int] = []

    def cancel() -> None:
        cancelled_at.append(engine.load().step_id)
        engine.abort("victim")

    def during_step(step: StepInput) -> None:
        if (
            (phase in ("queued", "prefill") and step.step_id == 2)
            or (phase == "verifying" and step.step_id == 4)
            or (phase == "last token" and _brings_last_token(step))
        ):
            cancel()

    def during_draft(query: DraftQuery) -> None:
        if phase == "drafting" and query.seq_id == 1 and len(query.token_ids) > 32:
            cancel()

    target = make_fake_target(limits, during_step)
    drafter = Interrupted(MODEL, during_draft)
    engine = make_engine(target, drafter, limits=limits, num_speculative_tokens=3)
    victim = Recorder(make_request(range(30), request_id="victim", max_tokens=12, ignore_eos=True))
    others = [
        Recorder(make_request([5, index], request_id=str(index), max_tokens=60, ignore_eos=True))
        for index in range(2)
    ]
    arrivals = [*others, victim] if phase == "queued" else [victim, *others]
    async with running(engine):
        for recorder in arrivals:
            engine.submit(recorder.request, recorder)
        for recorder in arrivals:
            await recorder.finished.wait()
        await asyncio.sleep(0)
        load = engine.load()
    assert victim.answer().finish_reason is FinishReason.ABORT
    expected = reference(MODEL, victim.request, max_model_len=256).token_ids
    assert victim.answer().token_ids == expected[: victim.answer().num_tokens]
    check_same(others, limits)
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    assert not drafter.held
    [cancelled_in] = cancelled_at
    victim_id = 1 + arrivals.index(victim)
    steps_of_victim = [
        step.step_id
        for step in target.steps
        if victim_id in (rows.seq_id for rows in step.sequences)
    ]
    assert max(steps_of_victim, default=0) <= cancelled_in


def _brings_last_token(step: StepInput) -> bool:
    """Whether the victim (sequence 1, 30 + 12 tokens) gets its last token in this step."""
    return any(
        rows.seq_id == 1 and rows.sampling is not None and rows.start + len(rows.token_ids) == 41
        for rows in step.sequences
    )
