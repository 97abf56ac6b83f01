"""How much one engine holds and runs at once."""

import math
from dataclasses import dataclass

from cluster.errors import ConfigurationError

USUAL_PROMPT_ROWS = 24  # beside sequences that decode, where it is not known what rows cost


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes an engine keeps to: in tokens, sequences, blocks and seconds.

    `block_size` and `num_blocks` are those of the target's KV cache; with `block_size` equal to
    `max_model_len` a block is one slot for one sequence. Raises ConfigurationError when the
    blocks cannot hold one full context, or a size leaves no room to work.

    `keys_per_row` is how many keys cost as much as a row does without any.
    `prefix_cache` has settled blocks serve later requests. See `scheduler` for the rest.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    block_size: int
    num_blocks: int
    draft_deadline_seconds: float
    max_prompt_rows_beside_decodes: int | None = None  # by what they cost
    keys_per_row: int = 1024
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value is not False and value <= 0:
                raise ConfigurationError(f"{name}: {value} is not above 0")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigurationError(
                f"num_blocks: {self.num_blocks} blocks of {self.block_size} tokens cannot hold "
                f"one context of {self.max_model_len}"
            )

    def prompt_cost(self, num_rows: int, position: int) -> float:
        """What so many rows of a prompt from `position` on cost, in rows that see no keys."""
        return num_rows * (1 + (position + (num_rows - 1) / 2) / self.keys_per_row)

    def prompt_rows(self, cost: float, position: int) -> int:
        """The most rows from `position` on that cost no more than that."""
        keys = position + self.keys_per_row - 0.5
        return int(math.sqrt(keys * keys + 2 * self.keys_per_row * cost) - keys + 1e-6)
