"""`drafthouse train-draft`: from prompts to a drafter for a target.

    questions ──gather──> corpus on disk ──train──> checkpoints ──write──> the drafter's folder
                             └── held out ──evaluate──> after every epoch

The budget is spent on answers first: a drafter is limited by the text it has seen, and seeing the
same again teaches less. Whatever stands on disk is not done twice.
"""

import json
import logging
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.control.cost import CostTable
from cluster.drafters.heads.eagle_load import LEAST_LAYERS, usual_layers
from cluster.drafters.vocabulary import check_same_tokenizer
from cluster.errors import ConfigurationError, MissingExtra
from cluster.local import in_passing_thread, use_threads
from cluster.models.load import load_spec
from cluster.models.reference import read_json, resolve
from cluster.models.spec import ModelSpec
from cluster.models.weights import Weights
from cluster.tools.bench.progress import Report
from cluster.tools.training.batches import Batches
from cluster.tools.training.card import Epoch, Trained
from cluster.tools.training.corpus import Corpus, answers
from cluster.tools.training.eagle import EagleTrainee, layer_config
from cluster.tools.training.evaluate import ALL, DEPTHS, Acceptance, evaluate
from cluster.tools.training.gather import gather, step_costs
from cluster.tools.training.loop import schedule_of, train
from cluster.tools.training.medusa import MedusaTrainee
from cluster.tools.training.plan import TrainPlan
from cluster.tools.training.questions import HELD_OUT, questions_of
from cluster.tools.training.student import StudentTrainee, few_layers, whole_model
from cluster.tools.training.trainee import Teacher, Trainee

logger = logging.getLogger(__name__)

ANSWERS_SHARE = 0.55  # of the budget; the rest is for learning from them
EPOCHS = "epochs.jsonl"
SPENT = "spent.json"
COSTS = "costs.json"
READABLE = 0o644


async def train_draft(plan: TrainPlan, *, report: Report) -> Trained:
    """Do what is left of a plan. Raises ConfigurationError."""
    _check(plan)
    plan.begin()
    questions = questions_of(plan)
    layers = _layers(plan)
    held_out = Corpus(plan.work / "held-out")
    corpus = Corpus(plan.work / "answers")
    await gather(plan, questions.held_out, held_out, layers=layers, seconds=1e9, report=report)
    spent = _Spent(plan.work / SPENT)
    left = ANSWERS_SHARE * 60 * plan.minutes - spent.seconds
    if left > 0:
        with spent:
            await gather(
                plan, questions.to_learn(), corpus, layers=layers, seconds=left, report=report
            )
    costs = await _costs(plan)
    trained = await in_passing_thread(
        lambda: _learned(plan, corpus, held_out, layers, costs, report)
    )
    questions.write_held_out(plan.out / HELD_OUT)
    trained.write()
    return trained


async def _costs(plan: TrainPlan) -> CostTable:
    """What the target's steps take, measured once."""
    file = plan.work / COSTS
    if not file.is_file():
        costs = await step_costs(plan, num_speculative_tokens=DEPTHS)
        file.write_text(json.dumps(costs.as_json()) + "\n")
    return CostTable.from_json(read_json(file))


class _Spent:
    """Seconds that answering has taken, kept on disk; those of a run that was killed are not."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._began = 0.0
        self.seconds: float = read_json(file).get("seconds", 0.0)

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.monotonic() - self._began
        self._file.write_text(json.dumps({"seconds": self.seconds}) + "\n")


def _learned(
    plan: TrainPlan,
    corpus: Corpus,
    held_out: Corpus,
    layers: tuple[int, ...],
    costs: CostTable,
    report: Report,
) -> Trained:
    """Train on what there is, and write the result."""
    if not corpus.entries:
        raise ConfigurationError("no answers to learn from: all prompts are too long, or no time")
    use_threads(None)
    torch.manual_seed(plan.seed)
    trainee = make_trainee(plan, layers, _frequent(plan, corpus)).to(plan.device)
    data = Batches(corpus.entries, longest=plan.longest, seed=plan.seed)
    seconds = (1 - ANSWERS_SHARE) * 60 * plan.minutes
    schedule = schedule_of(trainee, data, plan, seconds=seconds)
    if schedule.epochs < 1:
        logger.warning("the time is enough for %.0f%% of the answers", 100 * schedule.epochs)
    file = plan.work / EPOCHS
    share = trainee.weights_per_token / load_spec(resolve(plan.target)).weights_per_row

    def after_epoch(epochs: float) -> None:
        found = evaluate(
            trainee, held_out.entries, longest=plan.longest, device=plan.device, num_depths=DEPTHS
        )
        speedup = found[ALL].speedup(costs, share) if found else None
        with file.open("a") as lines:
            lines.write(json.dumps(Epoch(epochs, found, speedup).as_json()) + "\n")

    train(trainee, data, schedule, plan, after_epoch=after_epoch, report=report)
    plan.out.mkdir(parents=True, exist_ok=True)
    trainee.write(plan.out)
    for written in plan.out.iterdir():  # safetensors lets nobody else read
        written.chmod(READABLE)
    return Trained(
        plan=plan,
        num_examples=len(corpus.entries),
        num_tokens=corpus.num_answer_tokens,
        num_held_out=len(held_out.entries),
        epochs=read_epochs(file),
    )


def read_epochs(file: Path) -> list[Epoch]:
    """What was noted after each, the last note counting."""
    found = {}
    for line in file.read_text().splitlines():
        data = json.loads(line)
        acceptance = {
            name: Acceptance(
                tuple(its["conditional"]), tuple(its["overlap"]), int(its["num_drafts"])
            )
            for name, its in data["acceptance"].items()
        }
        found[round(data["epochs"], 2)] = Epoch(data["epochs"], acceptance, data["speedup"])
    return [found[epochs] for epochs in sorted(found)]


def make_trainee(plan: TrainPlan, layers: tuple[int, ...], token_ids: Tensor) -> Trainee:
    """What is to be trained, at its beginning; it learns of `token_ids`. Raises ConfigurationError.

    On the CPU.
    """
    folder = resolve(plan.target)
    spec = load_spec(folder)
    with Weights(folder, dtype=torch.float32, device="cpu") as weights:
        embedding = weights.whole("model.embed_tokens.weight")
        head = embedding if spec.tied_head else weights.whole("lm_head.weight")
        norm = weights.whole("model.norm.weight")
        teacher = Teacher(norm, head[token_ids], token_ids, epsilon=spec.rms_norm_eps)
        if plan.kind == "eagle":
            eagle = EagleTrainee(
                teacher,
                config=layer_config(read_json(folder / "config.json")),
                layers=layers,
                embedding=embedding,
                num_depths=plan.num_depths,
                verifier=plan.target,
            )
            eagle.begin_from(weights, last_layer=spec.num_layers - 1)
            return eagle
        if plan.kind == "medusa":
            return MedusaTrainee(
                teacher, num_depths=plan.num_depths, head=head, verifier=plan.target
            )
    return StudentTrainee(teacher, _student_model(plan, spec, folder), tokenizer_of=folder)


def _student_model(plan: TrainPlan, spec: ModelSpec, folder: Path) -> Any:  # noqa: ANN401
    """Some layers of the target, or the model to begin from. Raises VocabularyMismatch."""
    if plan.begin_from is not None:
        beginning = resolve(plan.begin_from)
        check_same_tokenizer(folder, beginning)
        return whole_model(beginning)
    last = spec.num_layers - 1
    count = plan.num_layers
    spread = [place * last // max(count - 1, 1) for place in range(count)]
    return few_layers(folder, spread)


def _check(plan: TrainPlan) -> None:
    """Refuse what cannot work. Raises ConfigurationError, MissingExtra."""
    if find_spec("accelerate") is None:
        raise MissingExtra(extra="train", purpose="training a draft")
    spec = load_spec(resolve(plan.target))
    if plan.kind == "eagle" and spec.num_layers < LEAST_LAYERS:
        raise ConfigurationError(f"--kind eagle: reads three of at least {LEAST_LAYERS} layers")
    if plan.kind == "student" and plan.begin_from is None and plan.num_layers > spec.num_layers:
        raise ConfigurationError(
            f"--num-layers {plan.num_layers}: the target has {spec.num_layers}"
        )
    if plan.begin_from is not None and plan.kind != "student":
        raise ConfigurationError(f"--begin-from is a model for --kind student, not {plan.kind}")
    if plan.longest > spec.max_position_embeddings:
        raise ConfigurationError(
            f"--max-prompt-tokens and --max-tokens: {plan.longest} together are over the target's "
            f"{spec.max_position_embeddings}"
        )


def _layers(plan: TrainPlan) -> tuple[int, ...]:
    """The target's layers whose inputs a drafter of this kind reads."""
    if plan.kind != "eagle":
        return ()
    return usual_layers(load_spec(resolve(plan.target)).num_layers)


def _frequent(plan: TrainPlan, corpus: Corpus) -> Tensor:
    """The tokens that answers are mostly made of, and the first of the vocabulary; ascending."""
    vocab_size = load_spec(resolve(plan.target)).vocab_size
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers(corpus.entries, longest=plan.longest):
        counts += torch.bincount(answer, minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    return order[: min(plan.draft_vocab_size, vocab_size)].sort().values
