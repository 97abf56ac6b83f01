"""Run by itself: a target at full load, and how many bytes that took. Prints one number."""

import sys
from pathlib import Path

import torch

from cluster.config import TargetConfig
from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.models.load import load_decoder, load_spec
from cluster.worker import TargetWorker

NUM_DRAFTS = 4


def main(folder: Path, config: TargetConfig) -> None:
    """Fill every context, then verify drafts in all of them at once."""
    before = _status("VmRSS")
    worker = TargetWorker(
        load_decoder(folder, dtype=config.dtype),
        num_blocks=config.total_blocks,
        block_size=config.tokens_per_block,
    )
    per_context = config.total_blocks // config.max_num_seqs
    tables = [
        tuple(range(index * per_context, (index + 1) * per_context))
        for index in range(config.max_num_seqs)
    ]
    last = config.max_model_len - NUM_DRAFTS - 1
    for seq_id, table in enumerate(tables):
        for start in range(0, last, config.max_num_batched_tokens):
            token_ids = (5,) * min(config.max_num_batched_tokens, last - start)
            rows = SequenceRows(seq_id=seq_id, block_table=table, start=start, token_ids=token_ids)
            worker.step(StepInput(1, (rows,)))
    sampling = SamplingSpec(seed=1, temperature=0.8, top_k=50, top_p=0.9)
    verified = tuple(
        SequenceRows(
            seq_id=seq_id,
            block_table=table,
            start=last,
            token_ids=(5,) * (NUM_DRAFTS + 1),
            num_drafts=NUM_DRAFTS,
            sampling=sampling,
            logprobs=True,
            top_logprobs=5,
        )
        for seq_id, table in enumerate(tables)
    )
    worker.step(StepInput(2, verified))
    sys.stdout.write(str(_status("VmHWM") - before))


def _status(field: str) -> int:
    """Bytes of one of the kernel's figures about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    load_spec(folder)  # what libraries take at first use is not the model's
    (torch.randn(64, 64) @ torch.randn(64, 64)).softmax(-1)
    main(folder, TargetConfig.model_validate_json(sys.argv[2]))
