"""The loop of training, which is transformers' own, and how long it may take.

A checkpoint is written at least once a minute, and the last whole one is where the same command
goes on. Checkpoints have a last file, which tells whether they are whole.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from cluster.tools.bench.progress import Report
from cluster.tools.training.batches import Batches
from cluster.tools.training.plan import TrainPlan
from cluster.tools.training.trainee import Trainee

logger = logging.getLogger(__name__)

SAVE_SECONDS = 40.0
TRIED_STEPS = 3  # timed before anything is decided
WARM_UP = 0.03  # of all steps
SCHEDULE = "schedule.json"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many steps are made in all; an epoch has `steps_per_epoch`."""

    max_steps: int
    steps_per_epoch: int

    @property
    def epochs(self) -> float:
        """Times that the average answer is seen."""
        return self.max_steps / max(self.steps_per_epoch, 1)


def schedule_of(trainee: Trainee, data: Batches, plan: TrainPlan, *, seconds: float) -> Schedule:
    """As many steps as fit into so many seconds, at most the plan's epochs; noted for next time."""
    file = plan.work / SCHEDULE
    if file.is_file():
        return Schedule(**json.loads(file.read_text()))
    step_seconds = _step_seconds(trainee, data, plan.device)
    most = plan.max_epochs * len(data)
    schedule = Schedule(max(min(int(seconds / step_seconds), most), 1), len(data))
    file.write_text(json.dumps(asdict(schedule)) + "\n")
    return schedule


def _step_seconds(trainee: Trainee, data: Batches, device: str) -> float:
    """Of forward and backward passes over some batches, the first of which is not counted."""
    places = [number * (len(data) - 1) // TRIED_STEPS for number in range(TRIED_STEPS + 1)]
    began = time.perf_counter()
    for count, place in enumerate(places):
        if count == 1:
            began = time.perf_counter()
        fields = {name: each.to(device) for name, each in data[place].items()}
        trainee(**fields)["loss"].backward()
    trainee.zero_grad(set_to_none=True)
    return (time.perf_counter() - began) / TRIED_STEPS


def train(
    trainee: Trainee,
    data: Batches,
    schedule: Schedule,
    plan: TrainPlan,
    *,
    after_epoch: Callable[[float], None],
    report: Report,
) -> None:
    """Make all steps that are left, and tell `after_epoch` whenever an epoch is over."""
    arguments = TrainingArguments(
        output_dir=str(plan.work),
        max_steps=schedule.max_steps,
        per_device_train_batch_size=1,  # an item is a batch already
        learning_rate=plan.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(round(WARM_UP * schedule.max_steps), 1),
        weight_decay=0.0,
        max_grad_norm=1.0,
        save_strategy="no",  # by the clock, see below
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=plan.device == "cpu",
        seed=plan.seed,
    )
    trainer = Trainer(
        model=trainee,
        args=arguments,
        train_dataset=data,
        data_collator=_only,
        callbacks=[_Keeper(after_epoch, report)],
    )
    trainer.remove_callback(PrinterCallback)  # standard output is the command's own
    trainer.train(resume_from_checkpoint=_last_whole(plan.work))


def _only(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The one item of a batch."""
    [item] = items
    return item


def _last_whole(work: Path) -> str | None:
    """The newest checkpoint that was written to its end."""
    whole = [file.parent for file in work.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    newest = max(whole, key=lambda folder: int(folder.name.split("-")[1]), default=None)
    return None if newest is None else str(newest)


class _Keeper(TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Says how far it is, and has a checkpoint written when the last is old."""

    def __init__(self, after_epoch: Callable[[float], None], report: Report) -> None:
        self._after_epoch = after_epoch
        self._report = report
        self._saved_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Called by the trainer."""
        del args
        self._report("steps of training", state.global_step, state.max_steps)
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Called by the trainer."""
        del args, state, control
        self._saved_at = time.monotonic()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Called by the trainer, at the very end of training too."""
        del args
        self._after_epoch(state.epoch)
        control.should_save = True
