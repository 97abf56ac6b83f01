"""Conformance of drafters beside the target that must be right: heads, and layers skipped.

They are right only where positions, tokens and hidden states are the ones they should be: one
position off, and next to nothing is accepted.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cluster.config import SkipDrafterConfig
from cluster.messages import Rule
from cluster.models.load import load_decoder
from cluster.request import Request, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.conformance.head_lab import HeadLab
from tests.conformance.inputs import SAMPLED, limits_of
from tests.conformance.lab import VOCAB_SIZE
from tests.harness import GREEDY, Recorder, make_request
from tests.heads import (
    SIZE,
    after,
    make_permuted,
    sure_eagle,
    sure_eagle3,
    sure_medusa,
    windowed_pair,
)

SURE = ("medusa", "eagle by state", "eagle by token", "eagle3", "eagle3 of a part")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> HeadLab:
    """A permuted target with heads that must be right about it."""
    folder = tmp_path_factory.mktemp("sure")
    target = make_permuted(folder / "target")
    heads = {
        "medusa": sure_medusa(folder / "medusa", target, num_heads=5),
        "eagle by state": sure_eagle(folder / "by-state", target, reads="state"),
        "eagle by token": sure_eagle(folder / "by-token", target, reads="token"),
        "eagle3": sure_eagle3(folder / "eagle3", target, range(SIZE)),
        "eagle3 of a part": sure_eagle3(
            folder / "part", target, [token_id for token_id in range(SIZE) if token_id % 4]
        ),
    }
    return HeadLab({"target": load_decoder(target, dtype="float32")}, heads=heads)


def cycles(sampling: SamplingParams, *, max_tokens: int = 40) -> list[Request]:
    """Prompts of a permuted target's tokens, some that it would say itself and some not.

    The last one of each leads to no token that a head of a part does not have.
    """
    rng = random.Random(2)
    prompts = [[5], [5, after(5), after(5, 2)], [*rng.choices(range(3, SIZE), k=70), 6]]
    prompts += [[*rng.choices(range(3, SIZE), k=rng.randint(2, 9)), 4 * i + 1] for i in range(5)]
    return [
        make_request(
            prompt, request_id=str(i), sampling=sampling, max_tokens=max_tokens, ignore_eos=True
        )
        for i, prompt in enumerate(prompts)
    ]


def acceptance(recorders: Sequence[Recorder]) -> float:
    """Of the drafts that were verified, leaving out those past the end of an answer."""
    deltas = [d for recorder in recorders for d in recorder.deltas if d.finish_reason is None]
    return sum(d.num_accepted for d in deltas) / sum(d.num_drafted for d in deltas)


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("name", SURE)
async def test_a_head_that_must_be_right_is_right(sure: HeadLab, name: str, k: int) -> None:
    """Greedy: every draft is accepted, whatever was in the prompt."""
    limits = limits_of(vocab_size=SIZE)
    recorders = await sure.recorders(cycles(GREEDY), name, k=k, limits=limits)
    await sure.check_same(recorders, limits)
    assert acceptance(recorders) == 1.0
    deep = min(k, 5) if name == "medusa" else k
    assert max(d.num_accepted for recorder in recorders for d in recorder.deltas) >= min(deep, 15)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("name", ["eagle by token", "eagle3"])
async def test_a_head_that_knows_the_distribution_is_right_when_sampled(
    sure: HeadLab, name: str, rule: Rule
) -> None:
    """T = 1.5, where the target strays often: the same noise on the same logits, or their ratio."""
    limits = limits_of(vocab_size=SIZE)
    sampling = SamplingParams(seed=3, temperature=1.5)
    asked = cycles(sampling, max_tokens=60)
    recorders = await sure.recorders(asked, name, k=4, limits=limits, rule=rule)
    if rule is Rule.COUPLED:
        await sure.check_same(recorders, limits)
    strayed = 0
    for recorder in recorders:
        token_ids = recorder.answer().token_ids
        strayed += sum(after(token_id) != following for token_id, following in pairwise(token_ids))
    assert strayed > 10
    assert acceptance(recorders) > 0.995


@pytest.mark.parametrize("chunk", [256, 7])
async def test_a_head_that_is_the_target_itself_is_right(tmp_path: Path, chunk: int) -> None:
    """A target of one layer that sees 4 tokens, and an EAGLE head with that very layer.

    The head lacks the first token only, which nobody sees any more: every draft is right if its
    keys and values are those of the settled tokens, and nothing of rejected ones.
    """
    target, head = windowed_pair(tmp_path)
    lab = HeadLab({"target": load_decoder(target, dtype="float32")}, heads={"eagle": head})
    limits = limits_of(max_num_batched_tokens=chunk)
    asked = [
        make_request(
            random.Random(i).choices(range(3, VOCAB_SIZE), k=5 + 20 * i),
            request_id=str(i),
            max_tokens=60,
            ignore_eos=True,
        )
        for i in range(4)
    ]
    recorders = await lab.recorders(asked, "eagle", k=4, limits=limits)
    await lab.check_same(recorders, limits)
    assert acceptance(recorders) > 0.99


async def test_a_prefix_from_the_cache_leaves_the_head_without_its_states(
    tmp_path: Path,
) -> None:
    """What is not computed has no hidden states: the head begins later, and is right again."""
    target, head = windowed_pair(tmp_path)
    lab = HeadLab({"target": load_decoder(target, dtype="float32")}, heads={"eagle": head})
    limits = limits_of(block_size=16, max_num_seqs=1)
    prompt = random.Random(5).choices(range(3, VOCAB_SIZE), k=70)
    asked = [
        make_request([*prompt, 9, 8 + i], request_id=str(i), max_tokens=60, ignore_eos=True)
        for i in range(3)
    ]
    recorders = await lab.recorders(asked, "eagle", k=4, limits=limits)
    await lab.check_same(recorders, limits)
    assert sum(recorder.num_cached > 0 for recorder in recorders) == 2
    assert acceptance(recorders) > 0.9


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> HeadLab:
    """A random target of 5 layers, where layers 1 and 3 and the attention of layer 0 do nothing."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("idle"), hidden_size=32, num_layers=5, max_position_embeddings=512
    )
    weights = load_file(folder / "model.safetensors")
    for name in ("0.self_attn.o", "1.self_attn.o", "1.mlp.down", "3.self_attn.o", "3.mlp.down"):
        weights[f"model.layers.{name}_proj.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    skipped = SkipDrafterConfig(skip_layers=(1, 3), skip_attention=(0,))
    return HeadLab({"target": load_decoder(folder, dtype="float32")}, skipped=skipped)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, replace(SAMPLED, top_k=40)],  # so that whole distributions come with the drafts
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 8, "num_blocks": 60, "max_num_batched_tokens": 9},
        {"block_size": 8, "num_blocks": 40, "max_num_seqs": 3},
    ],
    ids=["one block", "many blocks", "put back"],
)
async def test_skipping_what_does_nothing_is_always_right(
    idle: HeadLab, sampling: SamplingParams, changes: dict[str, int], rule: Rule
) -> None:
    """What is drafted on the target's own keys and values is the target's own, to the last bit.

    With prefixes from the cache, copied blocks and sequences that were put back; under the ratio
    rule the distributions are equal, and nothing can be rejected.
    """
    limits = limits_of(**changes)
    rng = random.Random(6)
    prefix = rng.choices(range(3, VOCAB_SIZE), k=45)
    asked = [
        make_request(
            [*prefix[: 45 - i % 3], *rng.choices(range(3, VOCAB_SIZE), k=i)],
            request_id=str(i),
            sampling=sampling,
            max_tokens=50,
            ignore_eos=True,
        )
        for i in range(8)
    ]
    recorders = await idle.recorders(asked, "skip", k=4, limits=limits, rule=rule)
    if rule is Rule.COUPLED or sampling is GREEDY:
        await idle.check_same(recorders, limits)
    assert acceptance(recorders) == 1.0
