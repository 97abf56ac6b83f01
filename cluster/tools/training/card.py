"""The card of a drafter: what it was trained on, and how it measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from cluster.tools.training.evaluate import ALL, Acceptance
from cluster.tools.training.plan import MOST_EPOCHS, TrainPlan


@dataclass(frozen=True, slots=True)
class Epoch:
    """How a drafter measured after so many epochs, by category of held-out answers."""

    epochs: float
    acceptance: Mapping[str, Acceptance]
    speedup: float | None = None  # predicted

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "epochs": self.epochs,
            "speedup": self.speedup,
            "acceptance": {name: each.as_json() for name, each in self.acceptance.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of a plan: answers and their tokens that were learned from, and every epoch."""

    plan: TrainPlan
    num_examples: int
    num_tokens: int
    num_held_out: int
    epochs: Sequence[Epoch]

    @property
    def last(self) -> Epoch:
        """After the end."""
        return self.epochs[-1]

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "out": str(self.plan.out),
            "kind": self.plan.kind,
            "num_examples": self.num_examples,
            "num_tokens": self.num_tokens,
            "num_held_out": self.num_held_out,
            "epochs": [each.as_json() for each in self.epochs],
        }

    def __rich__(self) -> Table:
        table = Table(title=self._title, title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
        for row in self._rows():
            table.add_row(*row)
        return table

    def write(self) -> None:
        """README.md, beside the weights."""
        plan = self.plan
        learned = f"{self.num_tokens} tokens of {self.num_examples} answers"
        prompts = plan.prompts.name if plan.prompts else "the built-in ones"
        more = ", and more that the target wrote itself" if plan.own_prompts else ""
        head = [
            f"# A draft for {Path(plan.target).name}",
            "",
            f"Kind {plan.kind}, trained in {self.last.epochs:.1f} epochs on {learned} of",
            f"{plan.target} ({plan.dtype}) itself.",
            f"Prompts: {prompts}{more}.",
        ]
        if self.last.epochs > MOST_EPOCHS:
            head.append(f"Every answer was seen more than {MOST_EPOCHS} times.")
        rows = [" | ".join(row) for row in (HEADINGS, ["---"] * len(HEADINGS), *self._rows())]
        body = ["", f"Held out: {self.num_held_out} greedy answers.", "", *rows]
        (plan.out / "README.md").write_text("\n".join([*head, *body]) + "\n")

    @property
    def _title(self) -> str:
        return (
            f"{self.plan.out}: {self.plan.kind}, {self.num_tokens} tokens of {self.num_examples} "
            f"answers, {self.last.epochs:.1f} epochs"
        )

    def _rows(self) -> list[list[str]]:
        """Every epoch's whole, then the last one by category."""
        rows = [_row(f"{each.epochs:.1f} epochs", each, ALL) for each in self.epochs]
        names = [name for name in self.last.acceptance if name != ALL]
        return rows + [_row(f"  {name}", self.last, name) for name in names]


HEADINGS = ("held out", "kept, by position", "accepted a step", "overlap", "predicted speed-up")


def _row(what: str, epoch: Epoch, category: str) -> list[str]:
    its = epoch.acceptance.get(category)
    if its is None:
        return [what, "", "", "", ""]
    speedup = "" if epoch.speedup is None or category != ALL else f"{epoch.speedup:.2f}x"
    return [
        what,
        " ".join(f"{each:.2f}" for each in its.conditional),
        f"{its.accepted_per_step:.2f}",
        f"{its.overlap[0]:.2f}",
        speedup,
    ]
