"""What is to be trained, of what, and for how long."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster.config import DType
from cluster.errors import ConfigurationError

Kind = Literal["eagle", "medusa", "student"]

PLAN = "plan.json"
MOST_EPOCHS = 3  # over the same answers, unless more are asked for: then they are learned by heart


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """What a command asks for. The same command goes on where it was stopped.

    `prompts` is a file of JSON lines, None for the built-in ones; of every category one in
    `held_out_every` is not trained on. With `own_prompts` the target writes more when these are
    used up. `begin_from` is a model to train further instead of the target's own layers.
    """

    target: str
    kind: Kind
    out: Path
    prompts: Path | None = None
    category_field: str = "category"
    held_out_every: int = 8
    own_prompts: bool = True
    begin_from: str | None = None
    minutes: float = 30.0
    max_epochs: int = MOST_EPOCHS
    dtype: DType = "float32"
    device: str = "cpu"
    concurrency: int = 16
    max_prompt_tokens: int = 512
    max_tokens: int = 128
    draft_vocab_size: int = 8192
    num_layers: int = 2  # of a student
    num_depths: int = 3  # tokens of a draft that are trained
    learning_rate: float = 1.5e-3
    seed: int = 0

    @property
    def work(self) -> Path:
        """Where answers and checkpoints are until the end, and after it."""
        return self.out.with_name(f"{self.out.name}.work")

    @property
    def longest(self) -> int:
        """Tokens of an example."""
        return self.max_prompt_tokens + self.max_tokens

    def begin(self) -> None:
        """Note the plan, or go on with one that is noted.

        Raises ConfigurationError, naming the first field that another command had otherwise.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / PLAN
        own = {name: _plain(value) for name, value in asdict(self).items()}
        if not file.is_file():
            file.write_text(json.dumps(own, indent=2) + "\n")
            return
        noted = json.loads(file.read_text())
        for name, value in own.items():
            if noted.get(name) != value:
                raise ConfigurationError(
                    f"{self.work} was begun with {name} {noted.get(name)!r}, not {value!r}; "
                    f"go on with the same, or choose another --out"
                )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
