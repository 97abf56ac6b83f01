"""What must hold on an accelerator, as plain functions: torch and transformers are all they need.

    python -m tests.gpu.checks            # on cuda
    python -m tests.gpu.checks --device cpu

Each check raises AssertionError with what it saw. The last one only measures.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cluster.drafters.model import DraftModel
from cluster.messages import (
    DraftWanted,
    ExchangeInput,
    Rule,
    SamplingSpec,
    SequenceRows,
    SequenceTokens,
    StepInput,
)
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.sampling.draw import sample
from cluster.sampling.noise import Stream, row_keys, uniform
from cluster.sampling.propose import propose
from cluster.worker import TargetWorker
from tests.checkpoints import make_checkpoint

PROMPT = tuple(range(3, 90))
GREEDY = SamplingSpec(seed=0, temperature=0.0, num_prompt_tokens=len(PROMPT))
SAMPLED = SamplingSpec(seed=11, temperature=0.8, top_p=0.9, num_prompt_tokens=len(PROMPT))
CONTEXT = 512
SHAPES = ((1, 1), (1, 8), (8, 1), (8, 5), (32, 5))  # sequences, rows of each
HALF_PRECISION_ERROR = 0.15  # of logits that spread over a few units
FLOAT_ERROR = 2e-3  # the order of sums is the device's own

Check = Callable[[Path, str], None]


def float32_logits_are_those_of_the_cpu(folder: Path, device: str) -> None:
    """The same weights and tokens give the same logits up to the order of sums."""
    error = (_prefill(folder, "float32", device) - _prefill(folder, "float32", "cpu")).abs().max()
    assert error < FLOAT_ERROR, f"logits differ by {error:.2e}"


def half_precision_is_close(folder: Path, device: str) -> None:
    """bfloat16 logits stay near float32's."""
    error = (_prefill(folder, "bfloat16", device) - _prefill(folder, "float32", "cpu")).abs()
    assert error.mean() < HALF_PRECISION_ERROR, f"logits differ by {error.mean():.2e} on average"


def noise_has_the_same_bits(folder: Path, device: str) -> None:
    """Target and drafter may sit on different devices: their noise is one."""
    del folder
    seeds, positions = [0, 1, 2**63, 2**64 - 1], [0, 5, 77, 4096]

    def noise(where: str) -> Tensor:
        keys = row_keys(seeds, positions, Stream.TOKEN, torch.device(where))
        return uniform(keys, torch.arange(1000, device=where).expand(len(seeds), -1)).cpu()

    assert torch.equal(noise(device), noise("cpu")), "uniform numbers differ"


def draws_are_those_of_the_cpu(folder: Path, device: str) -> None:
    """One row of logits, seed and position gives one token wherever it is drawn."""
    del folder
    logits = 3 * torch.randn(64, 700, generator=torch.Generator().manual_seed(5))
    kinds = (
        SamplingSpec(seed=1, temperature=0.0),
        SamplingSpec(seed=2, temperature=0.7, top_p=0.9),
        SamplingSpec(seed=3, temperature=1.3, top_k=20),
        SamplingSpec(seed=4, min_p=0.05, repetition_penalty=1.2, logit_bias=((7, 3.0),)),
    )
    specs = [kinds[row % len(kinds)] for row in range(len(logits))]
    histories = [list(range(row % 50)) for row in range(len(logits))]

    def drawn(where: str) -> list[int]:
        return sample(logits.to(where), specs, list(range(len(logits))), histories=histories)

    here, there = drawn("cpu"), drawn(device)
    different = [
        row for row, pair in enumerate(zip(here, there, strict=True)) if len(set(pair)) > 1
    ]
    assert not different, f"rows {different} drew other tokens"


def verified_rows_are_single_rows(folder: Path, device: str) -> None:
    """Drafts that are the target's own tokens are all accepted, whatever the layout."""
    for block_size in (16, 64, CONTEXT):
        alone = _generate(folder, device, GREEDY, num_tokens=12, block_size=block_size)
        worker = _worker(folder, device, block_size=block_size)
        num_blocks = CONTEXT // block_size
        _step(worker, PROMPT[:-1], start=0, num_blocks=num_blocks, sampling=None)
        answer = _step(
            worker,
            (PROMPT[-1], *alone[:-1]),
            start=len(PROMPT) - 1,
            num_blocks=num_blocks,
            num_drafts=len(alone) - 1,
        )
        assert answer.token_ids == tuple(alone), f"blocks of {block_size}: other tokens"


def layouts_give_the_same_tokens(folder: Path, device: str) -> None:
    """Paged and contiguous KV memory, drawn with noise."""
    runs = {
        tuple(_generate(folder, device, SAMPLED, num_tokens=24, block_size=size))
        for size in (16, 128, CONTEXT)
    }
    assert len(runs) == 1, "the block size changed a token"


def a_drafter_of_the_same_weights_agrees(folder: Path, device: str) -> None:
    """Nearly everything it drafts is what the target draws, with noise too."""
    decoder = load_decoder(folder, dtype="float32", device=device)
    model = DraftModel(decoder, num_blocks=2, block_size=CONTEXT)
    tokens = _generate(folder, device, SAMPLED, num_tokens=8, block_size=CONTEXT)
    message = ExchangeInput(
        engine_id="check",
        step_id=1,
        wanted=(
            DraftWanted(
                seq_id=1, base_length=0, new_token_ids=PROMPT, num_wanted=8, sampling=SAMPLED
            ),
        ),
    )
    draft = model.exchange(message).drafts[1]
    drafted = getattr(draft, "token_ids", ())
    num_equal = sum(a == b for a, b in zip(drafted, tokens, strict=False))
    assert num_equal >= 7, f"{num_equal} of 8 drafts are the target's tokens"


def both_rules_run(folder: Path, device: str) -> None:
    """Ratio verification with distributions from the device accepts a drafter like the target."""
    decoder = load_decoder(folder, dtype="float32", device=device)
    segment = [Segment((0,), 0, len(PROMPT))]
    cache = _cache(decoder)
    hidden = decoder.forward(torch.tensor(PROMPT, device=device), segment, cache)
    logits = decoder.logits(hidden[-1:])
    proposal = propose(logits, [SAMPLED], [len(PROMPT)], histories=[PROMPT], rule=Rule.RATIO)[0]
    assert proposal is not None, "nothing was drafted"
    worker = _worker(folder, device, block_size=CONTEXT)
    _step(worker, PROMPT[:-1], start=0, num_blocks=1, sampling=None)
    rows = SequenceRows(
        seq_id=1,
        block_table=(0,),
        start=len(PROMPT) - 1,
        token_ids=(PROMPT[-1], proposal.token_id),
        num_drafts=1,
        sampling=SAMPLED,
        draft_distributions=() if proposal.distribution is None else (proposal.distribution,),
    )
    answer = worker.step(StepInput(2, (rows,), rule=Rule.RATIO)).sequences[0]
    assert answer.num_accepted == 1, "a draft from the target's own distribution was rejected"


def invariance_and_step_times(folder: Path, device: str) -> None:
    """Prints which schedules change bits, and the milliseconds of a step by its shape."""
    for dtype in ("float32", "bfloat16"):
        worker = TargetWorker(
            load_decoder(folder, dtype=dtype, device=device), num_blocks=32, block_size=CONTEXT
        )
        print(f"  {dtype}: schedules that change bits: {worker.self_check() or 'none'}")  # noqa: T201
        for num_sequences, num_rows in SHAPES:
            milliseconds = 1000 * _step_seconds(worker, num_sequences, num_rows)
            print(f"  {dtype} {num_sequences} x {num_rows}: {milliseconds:.2f} ms")  # noqa: T201


CHECKS: tuple[Check, ...] = (
    float32_logits_are_those_of_the_cpu,
    half_precision_is_close,
    noise_has_the_same_bits,
    draws_are_those_of_the_cpu,
    verified_rows_are_single_rows,
    layouts_give_the_same_tokens,
    a_drafter_of_the_same_weights_agrees,
    both_rules_run,
    invariance_and_step_times,
)


def _cache(decoder: Decoder) -> KVCache:
    return KVCache.of(decoder, num_blocks=1, block_size=CONTEXT)


def _prefill(folder: Path, dtype: str, device: str) -> Tensor:
    decoder = load_decoder(folder, dtype=dtype, device=device)
    rows = torch.tensor(PROMPT, device=device)
    hidden = decoder.forward(rows, [Segment((0,), 0, len(PROMPT))], _cache(decoder))
    return decoder.logits(hidden).cpu()


def _worker(folder: Path, device: str, *, block_size: int) -> TargetWorker:
    decoder = load_decoder(folder, dtype="float32", device=device)
    return TargetWorker(decoder, num_blocks=CONTEXT // block_size, block_size=block_size)


def _step(
    worker: TargetWorker,
    token_ids: Sequence[int],
    *,
    start: int,
    num_blocks: int,
    num_drafts: int = 0,
    sampling: SamplingSpec | None = GREEDY,
) -> SequenceTokens:
    rows = SequenceRows(
        seq_id=1,
        block_table=tuple(range(num_blocks)),
        start=start,
        token_ids=tuple(token_ids),
        num_drafts=num_drafts,
        sampling=sampling,
    )
    answers = worker.step(StepInput(1, (rows,))).sequences
    return answers[0] if answers else SequenceTokens(seq_id=1, num_accepted=0, token_ids=())


def _generate(
    folder: Path, device: str, sampling: SamplingSpec, *, num_tokens: int, block_size: int
) -> list[int]:
    """Tokens drawn one at a time after the prompt."""
    worker = _worker(folder, device, block_size=block_size)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        rows = tokens[-1:] or PROMPT
        start = len(PROMPT) + len(tokens) - len(rows)
        answer = _step(
            worker, rows, start=start, num_blocks=CONTEXT // block_size, sampling=sampling
        )
        tokens += answer.token_ids
    return tokens


def _step_seconds(worker: TargetWorker, num_sequences: int, num_rows: int) -> float:
    """The best of some steps after a context of 100 tokens; answers come back, so it is synced."""
    step = StepInput(
        1,
        tuple(
            SequenceRows(
                seq_id=sequence,
                block_table=(sequence,),
                start=100,
                token_ids=(5,) * num_rows,
                num_drafts=num_rows - 1,
                sampling=GREEDY,
            )
            for sequence in range(num_sequences)
        ),
    )
    best = float("inf")
    for _ in range(12):
        start = time.perf_counter()
        worker.step(step)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Run every check; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), vocab_size=700, hidden_size=128, num_layers=3)
        for check in CHECKS:
            try:
                check(folder, device)
            except AssertionError as error:
                failed = True
                print(f"FAILED {check.__name__}: {error}")  # noqa: T201
            else:
                print(f"passed {check.__name__}")  # noqa: T201
    sys.exit(failed)


if __name__ == "__main__":
    main()
