"""What a rank does in a process of its own. Nothing here takes long to import."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from cluster.errors import TargetUnavailable
from cluster.messages import BlockCopy, Rule, SamplingSpec, SequenceRows, StepInput, StepOutput
from cluster.models.linear import LINEARS, Linear
from cluster.models.load import load_decoder
from cluster.models.parallel import Ranks
from cluster.request import Grammar, GrammarKind
from cluster.worker import TargetWorker
from tests.models.runs import in_chunks, in_company, make_cache, prefill, random_ids

NUM_TOKENS = 80
LENGTHS = (67, 12)
GREEDY = SamplingSpec(seed=1, temperature=0.0)
SEEDED = SamplingSpec(seed=2, temperature=0.9, top_p=0.95)


@dataclass
class Seen:
    """What one rank found with one model."""

    logits: Tensor
    schedules: dict[str, bool]
    self_check: tuple[str, ...]
    answers: list[StepOutput | None]
    num_elements: int
    num_kv_heads: int


def look(ranks: Ranks | None, folder: Path, dtype: str) -> Seen:
    """Compute the same positions in many ways, step, and count what is held."""
    torch.set_num_threads(1)
    sizes: list[int] = []
    make_linear = LINEARS["cpu", dtype]

    def counting(weight: Tensor, bias: Tensor | None) -> Linear:
        sizes.append(weight.numel())
        return make_linear(weight, bias)

    with mock.patch.dict(LINEARS, {("cpu", dtype): counting}):
        decoder = load_decoder(folder, dtype=dtype, ranks=ranks)
    token_ids = random_ids(decoder, NUM_TOKENS)
    expected = prefill(decoder, token_ids)
    sequences = [random_ids(decoder, length, seed=length) for length in LENGTHS]
    alone = [prefill(decoder, each) for each in sequences]
    together = in_company(
        decoder, sequences, make_cache(decoder, num_blocks=9), seed=3, max_rows=20
    )
    worker = TargetWorker(decoder, num_blocks=8, block_size=64)
    leads = ranks is None or ranks.rank == 0
    return Seen(
        expected,
        {
            "chunks": torch.equal(
                in_chunks(decoder, token_ids, [40, 1, 7, 2], make_cache(decoder)), expected
            ),
            "single rows": torch.equal(
                in_chunks(decoder, token_ids[:8], [1], make_cache(decoder)), expected[:8]
            ),
            "company": all(map(torch.equal, together, alone)),
        },
        worker.self_check(),
        [worker.step(each) if leads else worker.follow(each) for each in steps()],
        sum(sizes),
        decoder.spec.num_kv_heads,
    )


def steps() -> Sequence[StepInput]:
    """A prompt chunk, a copied block, drafts, scores, a grammar nobody has, and no rows at all."""
    prompt = tuple(range(3, 30))
    chunk = SequenceRows(seq_id=1, block_table=(0,), start=0, token_ids=prompt[:20])
    rest = replace(chunk, block_table=(3,), start=20, token_ids=prompt[20:], sampling=GREEDY)
    drafts = SequenceRows(
        seq_id=2,
        block_table=(1,),
        start=0,
        token_ids=(*prompt, 7, 8),
        num_drafts=2,
        sampling=SEEDED,
    )
    scored = replace(chunk, seq_id=3, block_table=(2,), scored_token_ids=prompt[1:20])
    failing = replace(drafts, seq_id=4, block_table=(4,), grammar=Grammar(GrammarKind.REGEX, "a"))
    return (
        StepInput(1, (chunk,)),
        StepInput(2, ()),
        StepInput(3, (rest, drafts), copies=(BlockCopy(0, 3, 20),)),
        StepInput(4, (scored, failing, replace(drafts, seq_id=5, block_table=(5,)))),
        StepInput(5, (failing,), rule=Rule.RATIO),
    )


def look_at_all(ranks: Ranks | None, folders: Mapping[tuple[str, str], Path]) -> list[object]:
    """Each case, and at last what a rank says when another has gone."""
    seen: list[object] = [look(ranks, folder, dtype) for (_, dtype), folder in folders.items()]
    if ranks is not None and ranks.rank == 0:
        try:
            while True:  # the first bytes may still go out
                ranks.total(torch.ones(2, 3))
        except TargetUnavailable as error:
            seen.append(str(error))
    return seen
