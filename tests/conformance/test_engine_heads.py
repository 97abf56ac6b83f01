"""Conformance of drafters beside the target, on a tiny random llama: heads, and layers skipped.

Random heads are mostly wrong, which is when rows of rejected drafts could be taken for settled
ones. Heads whose weights must be right are right only where positions, tokens and hidden states
are the ones they should be: one position off, and next to nothing is accepted.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import (
    EagleDrafterConfig,
    HeadDrafterConfig,
    MedusaDrafterConfig,
    SkipDrafterConfig,
    TargetConfig,
)
from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.heads.kinds import kind_of
from cluster.drafters.heads.model import BesideTarget, HeadModel
from cluster.drafters.model import ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.skipping import SkipDrafter
from cluster.engine.limits import EngineLimits
from cluster.interfaces import Drafter
from cluster.local_drafter import load_head, part_of
from cluster.messages import Rule
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from cluster.request import Request, SamplingParams
from cluster.worker import TargetWorker, ThreadTarget
from tests.checkpoints import make_checkpoint
from tests.conformance.lab import EOS_TOKEN_ID, PlainAnswers, answered
from tests.harness import (
    GREEDY,
    Recorder,
    make_engine,
    make_limits,
    make_request,
)
from tests.heads import (
    SIZE,
    after,
    make_eagle,
    make_eagle3,
    make_medusa,
    make_permuted,
    sure_eagle,
    sure_eagle3,
    sure_medusa,
    windowed_pair,
)

VOCAB_SIZE = 512
SAMPLED = SamplingParams(seed=7, temperature=0.8)
K = (1, 2, 5, 16)
BESIDE = ("medusa", "eagle", "eagle3", "skip")
SURE = ("medusa", "eagle by state", "eagle by token", "eagle3", "eagle3 of a part")
CONFIGS: dict[str, Callable[..., HeadDrafterConfig]] = {
    "medusa": MedusaDrafterConfig,
    "eagle": EagleDrafterConfig,
}


@dataclass
class HeadLab:
    """A target and heads for it; remembers what the target answers by itself.

    The drafter "skip" is the target without `skipped` of its layers.
    """

    target: Decoder
    heads: dict[str, Path]
    skipped: tuple[int, ...] = ()
    plain_answers: PlainAnswers = field(default_factory=PlainAnswers)

    async def recorders(
        self,
        asked: Sequence[Request],
        names: Sequence[str],
        *,
        k: int,
        limits: EngineLimits,
        rule: Rule = Rule.COUPLED,
    ) -> list[Recorder]:
        """Every request's deltas; several heads are a choice, with n-grams as the free drafter."""
        with ExitStack() as stack:
            worker = TargetWorker(
                self.target, num_blocks=limits.num_blocks, block_size=limits.block_size
            )
            target = ThreadTarget(worker)
            stack.callback(target.close)
            members = [self._member(name, worker, target, limits, rule, k) for name in names]
            choice = ChoiceDrafter(free=[NgramDrafter()], paid=members, patience_seconds=5.0)
            drafter = members[0] if len(members) == 1 else choice
            engine = make_engine(
                target,
                drafter,
                limits=limits,
                num_speculative_tokens=k,
                eos_token_ids=[EOS_TOKEN_ID],
                rule=rule,
            )
            return await answered(engine, asked, limits)

    async def check_same(self, recorders: Sequence[Recorder], limits: EngineLimits) -> None:
        """Each answer equals the one with speculation off."""
        plain = partial(self.recorders, names=(), k=0, limits=limits)
        await self.plain_answers.check(recorders, limits, plain)

    def _member(
        self,
        name: str,
        worker: TargetWorker,
        target: ThreadTarget,
        limits: EngineLimits,
        rule: Rule,
        k: int,
    ) -> Drafter:
        if name == "skip":
            config = SkipDrafterConfig(skip_layers=self.skipped, skip_attention=(0,))
            part = part_of(worker.decoder, config)
            return SkipDrafter(part, worker.cache, thread=target, name=name, rule=rule)
        reference = str(self.heads[name])
        head = load_head(
            CONFIGS[kind_of(reference)](model=reference),
            worker.decoder,
            TargetConfig(max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len),
            max_draft=k,
        )
        model = HeadModel(head, worker.keep_hidden(head.wanted), name=name)
        return ModelDrafter(model, name=name, rule=rule, thread=BesideTarget(model, target))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only wait for each other in models this small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> HeadLab:
    """A random target with a head of every kind and layout."""
    folder = tmp_path_factory.mktemp("heads")
    target = make_checkpoint(
        folder / "target", seed=1, hidden_size=32, num_layers=5, max_position_embeddings=2304
    )
    heads = {
        "medusa": make_medusa(folder / "medusa", target, num_heads=4),
        "eagle": make_eagle(folder / "eagle", target),
        "eagle3": make_eagle3(folder / "eagle3", target, layout="speculators"),
    }
    return HeadLab(load_decoder(target, dtype="float32"), heads, skipped=(2,))


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
    return HeadLab(load_decoder(target, dtype="float32"), heads)


def limits_of(**changes: float) -> EngineLimits:
    sizes = {"vocab_size": VOCAB_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return make_limits(**(sizes | changes))


def wide_limits(max_num_seqs: int = 16) -> EngineLimits:
    return limits_of(max_model_len=2100, max_num_seqs=max_num_seqs, max_num_batched_tokens=512)


def requests(sampling: SamplingParams, max_tokens: int, *, number: int = 9) -> list[Request]:
    """A word repeated, a single token, a prompt of 600 tokens, and others."""
    rng = random.Random(1)
    long = rng.choices(range(3, VOCAB_SIZE), k=600)
    prompts = [[5, 6, 7] * 48, [3], long]
    prompts += [rng.choices(range(3, VOCAB_SIZE), k=rng.randint(2, 60)) for _ in range(number - 3)]
    return [
        make_request(prompt, request_id=str(index), sampling=sampling, max_tokens=max_tokens)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("name", BESIDE)
async def test_x01_every_head_and_k_give_the_plain_answer(
    lab: HeadLab, name: str, k: int, sampling: SamplingParams
) -> None:
    """T = 0 and 0.8: tokens, logprob bits, finish reason and usage as without speculation."""
    limits = wide_limits()
    recorders = await lab.recorders(requests(sampling, 10), [name], k=k, limits=limits)
    await lab.check_same(recorders, limits)
    drafted = sum(recorder.num_drafted for recorder in recorders)
    assert drafted > 0
    assert sum(recorder.num_accepted for recorder in recorders) < drafted


async def test_x01_all_beside_each_other(lab: HeadLab) -> None:
    """A choice of all of them: each on its own part of what the same steps leave behind."""
    limits = wide_limits()
    asked = requests(GREEDY, 30)
    recorders = await lab.recorders(asked, BESIDE, k=5, limits=limits)
    await lab.check_same(recorders, limits)


@pytest.mark.parametrize("name", BESIDE)
async def test_x07_neighbours_change_nothing(lab: HeadLab, name: str) -> None:
    """One at a time and 8 at a time: Same."""
    for concurrency in (1, 8):
        limits = wide_limits(concurrency)
        recorders = await lab.recorders(requests(SAMPLED, 12, number=6), [name], k=4, limits=limits)
        await lab.check_same(recorders, limits)


@pytest.mark.parametrize("name", BESIDE)
async def test_x08_a_tight_budget_and_lost_rounds_change_nothing(lab: HeadLab, name: str) -> None:
    """Budget 5 for eight sequences, and blocks so few that decodes are put back: Same."""
    tight = limits_of(max_model_len=96, max_num_batched_tokens=5, block_size=4, num_blocks=40)
    asked = [
        make_request([5, 6, 7 + i] * 3, request_id=str(i), sampling=SAMPLED, max_tokens=30)
        for i in range(8)
    ]
    recorders = await lab.recorders(asked, [name], k=4, limits=tight)
    await lab.check_same(recorders, limits_of(max_model_len=96))


@pytest.mark.parametrize("name", BESIDE)
async def test_the_ratio_rule_takes_their_distributions(lab: HeadLab, name: str) -> None:
    """Greedy requests are Same under it; sampled ones end, with drafts that were believed."""
    limits = limits_of()
    greedy = await lab.recorders(
        requests(GREEDY, 10, number=8)[3:], [name], k=4, limits=limits, rule=Rule.RATIO
    )
    await lab.check_same(greedy, limits)
    sampled = await lab.recorders(
        requests(SAMPLED, 20, number=8)[3:], [name], k=4, limits=limits, rule=Rule.RATIO
    )
    assert sum(recorder.num_drafted for recorder in sampled) > 0


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
    recorders = await sure.recorders(cycles(GREEDY), [name], k=k, limits=limits)
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
    recorders = await sure.recorders(asked, [name], k=4, limits=limits, rule=rule)
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
    lab = HeadLab(load_decoder(target, dtype="float32"), {"eagle": head})
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
    recorders = await lab.recorders(asked, ["eagle"], k=4, limits=limits)
    await lab.check_same(recorders, limits)
    assert acceptance(recorders) > 0.99


async def test_a_prefix_from_the_cache_leaves_the_head_without_its_states(
    tmp_path: Path,
) -> None:
    """What is not computed has no hidden states: the head begins later, and is right again."""
    target, head = windowed_pair(tmp_path)
    lab = HeadLab(load_decoder(target, dtype="float32"), {"eagle": head})
    limits = limits_of(block_size=16, max_num_seqs=1)
    prompt = random.Random(5).choices(range(3, VOCAB_SIZE), k=70)
    asked = [
        make_request([*prompt, 9, 8 + i], request_id=str(i), max_tokens=60, ignore_eos=True)
        for i in range(3)
    ]
    recorders = await lab.recorders(asked, ["eagle"], k=4, limits=limits)
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
    return HeadLab(load_decoder(folder, dtype="float32"), {}, skipped=(1, 3))


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
    recorders = await idle.recorders(asked, ["skip"], k=4, limits=limits, rule=rule)
    if rule is Rule.COUPLED or sampling is GREEDY:
        await idle.check_same(recorders, limits)
    assert acceptance(recorders) == 1.0
