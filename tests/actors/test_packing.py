"""What crosses between an engine and a gateway comes out as it went in."""

from cluster.actors.packing import NAMES, pack_outputs, unpack_outputs
from cluster.messages import EngineLoad, OutputBatch, TokenDelta, TracedStep
from cluster.request import FinishReason

LOAD = EngineLoad(running=3, waiting=1, free_blocks=2, step_id=7, prefixes=frozenset({5, 6}))
STEP = TracedStep(
    step_id=7,
    ended_at=1.5,
    wait_seconds=0.0,
    draft_seconds=0.1,
    verify_seconds=0.2,
    num_sequences=3,
    num_asked=4,
    num_drafted=2,
    num_accepted=1,
    drafter="ngram",
    reason="short",
)
FULL = TokenDelta(
    request_id="r",
    token_ids=(1, 2),
    logprobs=(-0.5, -0.25),
    top_logprobs=(((1, -0.5),), ((2, -0.25),)),
    prompt_logprobs=(-1.0,),
    num_cached_tokens=3,
    num_steps=2,
    num_drafted=2,
    num_accepted=1,
    finish_reason=FinishReason.STOP,
    error="none",
    traced_steps=(STEP,),
    emitted_at=1.25,
)


def test_a_batch_comes_out_as_it_went_in() -> None:
    """Every field of every delta, in order, and the load."""
    empty = TokenDelta(request_id="s")
    assert all(getattr(FULL, name) != getattr(empty, name) for name in NAMES)
    batch = unpack_outputs(pack_outputs(OutputBatch("engine", (FULL, empty), LOAD)))
    assert batch == OutputBatch("engine", (FULL, empty), LOAD)
    assert batch.deltas[0].emitted_at == FULL.emitted_at  # which no comparison looks at
    assert unpack_outputs(pack_outputs(OutputBatch("engine", (), LOAD))).deltas == ()
