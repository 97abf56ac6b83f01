"""Making drafters: what is learned is what is served, and nothing is done twice or lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.errors import ConfigurationError, VocabularyMismatch
from cluster.models.hidden import HiddenRows, HiddenWanted, SettledRows
from cluster.models.load import load_spec
from cluster.text.tokenizer import ChatMessage, load_tokenizer
from cluster.tools.training.batches import TOKENS, Batch, Batches
from cluster.tools.training.corpus import Corpus, Entry, Example, answers, read
from cluster.tools.training.eagle import EagleTrainee
from cluster.tools.training.evaluate import ALL, Acceptance, evaluate
from cluster.tools.training.loop import SCHEDULE
from cluster.tools.training.plan import Kind, TrainPlan
from cluster.tools.training.questions import OWN, questions_of, user_turn
from cluster.tools.training.train import make_trainee, train_draft
from cluster.tools.training.trainee import Teacher, Trainee
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.drafters.test_heads_reference import Plain, Table, eagle3

NUM_LAYERS = 6
LAYERS = (2, 3, 3)
WIDTH = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("target"),
        num_layers=NUM_LAYERS,
        max_position_embeddings=512,
        rope_theta=50000.0,  # the reference's
    )


@pytest.fixture
def plan(target: Path, tmp_path: Path) -> TrainPlan:
    """Four prompts, each of them twice: what is held out was seen, and can be learned by heart."""
    prompts = [f"say the number {number} again and again" for number in range(4)]
    lines = [{"prompt": each, "category": "numbers"} for each in prompts for _ in range(2)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return TrainPlan(
        target=str(target),
        kind="eagle",
        out=tmp_path / "draft",
        prompts=file,
        held_out_every=2,
        own_prompts=False,
        minutes=0.3,
        max_epochs=60,
        concurrency=4,
        max_prompt_tokens=64,
        max_tokens=24,
        draft_vocab_size=512,
        learning_rate=3e-3,
    )


def trained(plan: TrainPlan) -> Mapping[str, float]:
    """What is kept of a draft, by category, after the last epoch."""
    result = asyncio.run(train_draft(plan, report=lambda *_: None))
    return {name: each.accepted_per_step for name, each in result.last.acceptance.items()}


@pytest.mark.parametrize(("kind", "most"), [("eagle", 0.7), ("medusa", 0.4), ("student", 0.7)])
def test_learns_by_heart_what_it_sees_often(plan: TrainPlan, kind: Kind, most: float) -> None:
    """At first nothing is kept. What Medusa heads can learn is less than what they would need."""
    plan = replace(plan, kind=kind, num_layers=4, max_epochs=150, learning_rate=1e-2, minutes=3.0)
    kept = trained(plan)
    assert kept["numbers"] > most
    assert "150.0 epochs" in (plan.out / "README.md").read_text()
    assert "more than 3 times" in (plan.out / "README.md").read_text()
    held_out = (plan.out / "held_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["category"] for line in held_out] == ["numbers"] * 4
    load_spec(plan.out) if kind == "student" else None


@torch.no_grad()
def test_an_eagle_head_in_training_is_the_one_that_is_served(plan: TrainPlan, target: Path) -> None:
    """Draft by draft: its logits at every depth, fed with its own states."""
    own = torch.arange(1, 512, 3)
    trainee = make_trainee(plan, LAYERS, own)
    for parameter in trainee.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    plan.out.mkdir()
    trainee.write(plan.out)
    model = LlamaForCausalLM.from_pretrained(target)
    config = json.loads((plan.out / "config.json").read_text())
    tensors = load_file(plan.out / "model.safetensors")
    token_ids = [7, 300, 12, 12, 91, 40]
    reference = eagle3(Plain(model, tensors, config), LAYERS, "layers.0.")(token_ids)
    drafted = [int(each.argmax()) for each in reference]
    text = [*token_ids, *drafted]
    table = Table(target, plan.out)
    table.step((0, token_ids[:-1], 0, ()))
    assert table.drafts({0: token_ids}) == {0: tuple(drafted)}
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    before_norm = torch.zeros_like(states[0])  # the teacher's, whom nobody asks here
    batch = one(text, torch.cat([*(states[layer] for layer in LAYERS), before_norm], dim=-1)[0])
    anchor = len(token_ids) - 2
    for depth, found in enumerate(trainee.states(batch, len(drafted))):
        logits = trainee.logits(found[:, anchor], depth)[0]
        torch.testing.assert_close(logits, reference[depth][own], rtol=0, atol=1e-3)


@torch.no_grad()
def test_a_student_in_training_is_the_model_that_is_written(plan: TrainPlan) -> None:
    plan = replace(plan, kind="student")
    trainee = make_trainee(plan, (), torch.arange(512))
    trainee.write(plan.out)
    assert load_spec(plan.out).num_layers == plan.num_layers
    assert load_tokenizer(plan.out).tokens == load_tokenizer(Path(plan.target)).tokens
    text = [7, 300, 12, 12, 91, 40]
    expected = AutoModelForCausalLM.from_pretrained(plan.out)(torch.tensor([text])).logits[0]
    batch = one(text, torch.zeros(len(text), 64))
    for depth, states in enumerate(trainee.states(batch, 3)):
        logits = trainee.logits(states, depth)[0]
        torch.testing.assert_close(logits, expected[1 + depth : -1], rtol=0, atol=1e-5)


def test_a_student_begins_from_another_model_of_the_same_tokens(
    plan: TrainPlan, tmp_path: Path
) -> None:
    small = make_checkpoint(tmp_path / "small", hidden_size=32, num_layers=1, seed=5)
    plan = replace(plan, kind="student", begin_from=str(small), max_epochs=1)
    trained(plan)
    assert load_spec(plan.out).hidden_size == 32
    other = make_checkpoint(tmp_path / "other")
    make_tokenizer(other, corpus=("zebras zip zigzag through the zoo, zebras zoom.",) * 4)
    with pytest.raises(VocabularyMismatch):
        make_trainee(replace(plan, begin_from=str(other)), (), torch.arange(512))


def test_goes_on_where_it_was_killed(plan: TrainPlan) -> None:
    """SIGKILL in the middle of training: the answers and the steps up to a checkpoint stand."""
    plan = replace(plan, minutes=2.0, max_epochs=100_000, out=plan.out)
    command = [
        *(sys.executable, "-c", "from cluster.cli import main; main()", "train-draft"),
        *("--target", plan.target, "--kind", plan.kind, "--out", str(plan.out)),
        *("--prompts", str(plan.prompts), "--held-out-every", "2", "--no-own-prompts"),
        *("--minutes", str(plan.minutes), "--max-epochs", str(plan.max_epochs)),
        *("--concurrency", "4", "--max-prompt-tokens", "64", "--max-tokens", "24"),
        *("--draft-vocab-size", "512", "--learning-rate", "0.003"),
    ]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        until = time.monotonic() + 240
        while not list(plan.work.glob("checkpoint-*/trainer_state.json")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = {file: file.stat().st_mtime_ns for file in plan.work.glob("*/answers-*")}
    steps = max(map(steps_of, plan.work.glob("checkpoint-*")))
    schedule = json.loads((plan.work / SCHEDULE).read_text())
    (plan.work / SCHEDULE).write_text(json.dumps(schedule | {"max_steps": steps + 2}))
    seen: list[int] = []

    def report(what: str, done: int, total: int) -> None:
        assert total
        if "training" in what:
            seen.append(done)

    result = asyncio.run(train_draft(plan, report=report))
    assert seen == [steps + 1, steps + 2]
    assert result.num_examples == 4
    after = {file: file.stat().st_mtime_ns for file in plan.work.glob("*/answers-*")}
    assert after == before


def steps_of(folder: Path) -> int:
    """That a checkpoint has behind it."""
    return int(folder.name.split("-")[1])


def test_prints_nothing_of_its_own(plan: TrainPlan, capsys: pytest.CaptureFixture[str]) -> None:
    """The standard output of a command with --json is one object."""
    trained(replace(plan, max_epochs=2))
    assert capsys.readouterr().out == ""


def test_another_command_does_not_go_on_with_it(plan: TrainPlan) -> None:
    plan.begin()
    plan.begin()
    with pytest.raises(ConfigurationError, match="learning_rate"):
        replace(plan, learning_rate=1.0).begin()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_prompt_tokens": 500}, "max-prompt-tokens.*512"),
        ({"begin_from": "x"}, "begin-from"),
        ({"kind": "student", "num_layers": 7}, "num-layers 7.*6"),
    ],
)
def test_refuses_what_cannot_work(
    plan: TrainPlan, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        trained(replace(plan, **changes))  # type: ignore[arg-type]
    assert not plan.work.exists()


def test_an_eagle_head_needs_some_layers(plan: TrainPlan, tmp_path: Path) -> None:
    flat = make_checkpoint(tmp_path / "flat", num_layers=3)
    with pytest.raises(ConfigurationError, match="4 layers"):
        trained(replace(plan, target=str(flat)))


def test_nothing_that_fits_is_nothing_to_learn_from(plan: TrainPlan) -> None:
    with pytest.raises(ConfigurationError, match="no answers"):
        trained(replace(plan, max_prompt_tokens=8))


def test_the_target_goes_on_asking_itself(plan: TrainPlan, target: Path) -> None:
    questions = questions_of(replace(plan, own_prompts=True))
    learned = [question for question, _ in zip(questions.to_learn(), range(9), strict=False)]
    assert [each.category for each in learned] == ["numbers"] * 4 + [OWN] * 5
    numbers = [each.number for each in (*learned, *questions.held_out)]
    assert len(set(numbers)) == len(numbers)
    tokenizer = load_tokenizer(target)
    turn = user_turn(tokenizer)
    assert turn is not None
    whole = tokenizer.chat([ChatMessage(role="user", content="hello there")])
    assert whole[: len(turn.before)] == turn.before
    assert whole[-len(turn.after) :] == turn.after


def test_the_target_s_own_prompts_are_answered(plan: TrainPlan) -> None:
    kept = trained(replace(plan, own_prompts=True, max_epochs=1, minutes=0.2))
    assert ALL in kept
    corpus = Corpus(plan.work / "answers")
    assert {"numbers", OWN} == {entry.category for entry in corpus.entries}


def example(number: int, length: int, num_prompt_tokens: int = 1) -> Example:
    """One whose tokens and states say which they are."""
    hidden = torch.arange(length).float()[:, None].expand(length, WIDTH) + 100 * number
    return Example(
        number=number,
        category=f"c{number % 2}",
        token_ids=tuple(range(number, number + length)),
        num_prompt_tokens=num_prompt_tokens,
        hidden=hidden,
    )


def test_a_corpus_has_what_was_written_whole(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.add([example(3, 5, 2), example(4, 7)])
    corpus.add([])
    corpus.add([example(9, 4)])
    (tmp_path / "answers-00002.partial").write_bytes(b"half of it")
    again = Corpus(tmp_path)
    assert again.numbers == {3, 4, 9}
    assert again.num_answer_tokens == 3 + 6 + 3
    found = list(read(again.entries, longest=6))
    assert [each.token_ids for each in found] == [
        (3, 4, 5, 6, 7),
        tuple(range(4, 10)),
        (9, 10, 11, 12),
    ]
    assert [each.category for each in found] == ["c1", "c0", "c1"]
    learned = [each.tolist() for each in answers(again.entries, longest=6)]
    assert learned == [list(each.token_ids[each.num_prompt_tokens :]) for each in found]
    assert found[1].hidden[:, 0].tolist() == [400, 401, 402, 403, 404, 405]
    again.add([example(5, 3)])
    assert Corpus(tmp_path).numbers == {3, 4, 5, 9}
    (tmp_path / "answers-00003.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="answers-00003"):
        Corpus(tmp_path)


@given(lengths=st.lists(st.integers(2, 700), min_size=1, max_size=80), seed=st.integers(0, 9))
def test_batches_have_every_example_once_and_are_of_a_size(lengths: list[int], seed: int) -> None:
    entries = [
        Entry(
            shard=Path("x"),
            first=0,
            number=number,
            category="",
            length=length,
            num_prompt_tokens=1,
        )
        for number, length in enumerate(lengths)
    ]
    batches = Batches(entries, longest=512, seed=seed).entries
    assert sorted(each.number for batch in batches for each in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(min(e.length, 512) for e in batch) <= TOKENS


def one(token_ids: Iterable[int], hidden: Tensor, *, num_prompt_tokens: int = 1) -> Batch:
    """A batch of one."""
    ids = torch.tensor([list(token_ids)])
    return Batch(ids, hidden[None], torch.tensor([ids.shape[1]]), torch.tensor([num_prompt_tokens]))


class Knowing(Trainee):
    """Drafts token `t + 1` after token t: right as long as a text counts up."""

    num_depths = 2

    def __init__(self, vocab_size: int) -> None:
        ones = torch.ones(WIDTH)
        super().__init__(
            Teacher(ones, torch.zeros(vocab_size, WIDTH), torch.arange(vocab_size), epsilon=1e-5)
        )
        self._vocab_size = vocab_size

    def states(self, batch: Batch, num_depths: int) -> list[Tensor]:
        """The token before the one that is drafted."""
        ids = batch.token_ids.float()[..., None]
        return [ids[:, 1 + depth : -1] for depth in range(num_depths)]

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """All on the next."""
        assert depth >= 0
        following = (states[..., 0].long() + 1) % self._vocab_size
        return 50.0 * torch.nn.functional.one_hot(following, self._vocab_size).float()

    @property
    def weights_per_token(self) -> int:
        """None."""
        return 0

    def write(self, folder: Path) -> None:
        """Never."""
        raise AssertionError(folder)


def test_acceptance_counts_drafts_that_go_on(tmp_path: Path) -> None:
    """A text that counts up, and then breaks off: which drafts reach and survive which place."""
    corpus = Corpus(tmp_path)
    token_ids = (0, 1, 2, 3, 4, 5, 9, 10)
    hidden = torch.zeros(len(token_ids), WIDTH)
    corpus.add(
        [
            Example(
                number=0,
                category="counting",
                token_ids=token_ids,
                num_prompt_tokens=3,
                hidden=hidden,
            )
        ]
    )
    found = evaluate(Knowing(16), corpus.entries, longest=64, num_depths=3)
    # first drafted tokens 3 4 5 9 10 (4 right); of those second ones 4 5 9 (then 10 of the last)
    assert found["counting"].conditional == pytest.approx((4 / 5, 2 / 3, 1 / 2))
    assert found[ALL] == found["counting"]
    assert found[ALL].num_drafts == 5
    assert found[ALL].accepted_per_step == pytest.approx(0.8 * (1 + 2 / 3 * 1.5))


def test_a_speedup_is_that_of_the_best_depth() -> None:
    rows = {1: 1.0, 2: 1.1, 3: 1.2, 4: 3.0}
    costs = CostTable(
        {
            StepShape(num_sequences=1, num_rows=count, num_context_tokens=128): seconds
            for count, seconds in rows.items()
        }
    )
    assert Acceptance((0.5, 1.0, 1.0), (), 9).speedup(costs, 0.1) == pytest.approx(2.0 / 1.4, 0.02)
    assert Acceptance((0.1, 0.1, 0.1), (), 9).speedup(costs, 0.1) == 1.0


def test_states_that_were_kept_are_taken_once() -> None:
    hidden = HiddenRows(
        HiddenWanted(num_sequences=2, num_rows=8),
        hidden_size=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rows = torch.arange(8.0)[:, None].expand(8, WIDTH)
    hidden.keep([SettledRows(1, 0, (5, 6, 7), 0), SettledRows(2, 0, (5, 6), 3)], rows, None)
    assert hidden.take((5, 6, 8)) is not None, "the last token may not be computed yet"
    assert hidden.take((5, 6, 8)) is None
    assert hidden.take((5, 6, 7, 8, 9)) is None
    taken = hidden.take((5, 6, 7))
    assert taken is not None
    assert taken[:, 0].tolist() == [0, 1, 2]


def test_only_what_is_trained_is_saved(plan: TrainPlan) -> None:
    trainee = make_trainee(plan, LAYERS, torch.arange(512))
    assert isinstance(trainee, EagleTrainee)
    names = set(trainee.state_dict())
    assert "fc.weight" in names
    assert not any("teacher" in name or "embedding" in name for name in names)
