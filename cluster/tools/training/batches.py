"""Examples side by side, padded: what a step of training computes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cluster.tools.training.corpus import Entry, read

TOKENS = 512  # of a batch, padding included: few, since steps teach more than their size does


@dataclass(frozen=True, slots=True)
class Batch:
    """Of `n` examples: token ids `[n, longest]`, hidden states `[n, longest, width]`, float32.

    Example i has `lengths[i]` tokens, of which the first `num_prompt_tokens[i]` are the prompt.
    """

    token_ids: Tensor
    hidden: Tensor
    lengths: Tensor
    num_prompt_tokens: Tensor

    def asked(self, depth: int) -> Tensor:
        """Which drafted tokens count, `[n, longest - 2 - depth]`, by their anchors.

        The anchor is the last position whose hidden state is known; the token after it is known,
        too. Token `depth` of the draft stands at `anchor + 2 + depth`, and counts in an answer.
        """
        positions = torch.arange(2 + depth, self.token_ids.shape[1], device=self.lengths.device)
        inside = positions < self.lengths[:, None]
        return inside & (positions >= self.num_prompt_tokens[:, None])


class Batches(Dataset[dict[str, Tensor]]):
    """Every example once, those of about the same length together; an item is a whole batch.

    `entries` has the examples of each.
    """

    def __init__(self, entries: Sequence[Entry], *, longest: int, seed: int = 0) -> None:
        self._longest = longest
        shuffled = list(entries)
        random.Random(seed).shuffle(shuffled)
        shuffled.sort(key=lambda entry: min(entry.length, longest) // 16)
        self.entries: list[list[Entry]] = []
        for entry in shuffled:
            last = self.entries[-1] if self.entries else None
            width = min(entry.length, longest) // 16 * 16 + 16
            if last is None or (len(last) + 1) * width > TOKENS:
                self.entries.append([entry])
            else:
                last.append(entry)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The fields of a Batch, by their names."""
        examples = list(read(self.entries[index], longest=self._longest))
        longest = max(len(each.token_ids) for each in examples)
        token_ids = torch.zeros(len(examples), longest, dtype=torch.int64)
        hidden = torch.zeros(len(examples), longest, examples[0].hidden.shape[1])
        for row, each in enumerate(examples):
            token_ids[row, : len(each.token_ids)] = torch.tensor(each.token_ids)
            hidden[row, : len(each.token_ids)] = each.hidden.float()
        return {
            "token_ids": token_ids,
            "hidden": hidden,
            "lengths": torch.tensor([len(each.token_ids) for each in examples]),
            "num_prompt_tokens": torch.tensor([each.num_prompt_tokens for each in examples]),
        }
