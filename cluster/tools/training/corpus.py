"""Answers of a target on disk, with the hidden states they were made of.

A folder of shards, each written whole or not at all, so that whoever is killed goes on with the
next. Hidden states are float16; logits are never stored, since a head makes them of the states.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cluster.errors import ConfigurationError

PATTERN = "answers-*.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt and its answer: `hidden` is `[len(token_ids), width]`, float16.

    The last token's states may be zeros: they were not computed. `number` is that of the question.
    """

    number: int
    category: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where an example is kept: rows `first` on of a shard."""

    shard: Path
    first: int
    number: int
    category: str
    length: int
    num_prompt_tokens: int

    @property
    def num_answer_tokens(self) -> int:
        """What there is to learn."""
        return self.length - self.num_prompt_tokens


class Corpus:
    """The examples of a folder; only one process may write at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: list[Entry] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._num_shards = 0
        for shard in sorted(folder.glob(PATTERN)):
            self._found(shard)

    @property
    def numbers(self) -> frozenset[int]:
        """The questions that were answered."""
        return frozenset(entry.number for entry in self.entries)

    @property
    def num_answer_tokens(self) -> int:
        """Of all answers together."""
        return sum(entry.num_answer_tokens for entry in self.entries)

    def add(self, examples: Sequence[Example]) -> None:
        """Write a shard."""
        if not examples:
            return
        shard = self._folder / f"answers-{self._num_shards:05}.safetensors"
        tensors = {
            "token_ids": torch.tensor([each for one in examples for each in one.token_ids]),
            "lengths": torch.tensor([len(one.token_ids) for one in examples]),
            "num_prompt_tokens": torch.tensor([one.num_prompt_tokens for one in examples]),
            "numbers": torch.tensor([one.number for one in examples]),
            "hidden": torch.cat([one.hidden.to(torch.float16) for one in examples]),
        }
        categories = json.dumps([one.category for one in examples])
        unfinished = shard.with_suffix(".partial")
        save_file(tensors, unfinished, metadata={"categories": categories})
        unfinished.rename(shard)
        self._found(shard)

    def _found(self, shard: Path) -> None:
        """Take in what a shard holds. Raises ConfigurationError for one that is none."""
        try:
            with safe_open(shard, framework="pt") as file:
                categories = json.loads(file.metadata()["categories"])
                columns = [
                    file.get_tensor(name).tolist()
                    for name in ("numbers", "lengths", "num_prompt_tokens")
                ]
        except Exception as error:  # safetensors raises its own, which is no other's subclass
            raise ConfigurationError(f"{shard}: no shard of answers: {error}") from error
        first = 0
        for number, length, num_prompt_tokens, category in zip(*columns, categories, strict=True):
            self.entries.append(
                Entry(
                    shard=shard,
                    first=first,
                    number=number,
                    category=category,
                    length=length,
                    num_prompt_tokens=num_prompt_tokens,
                )
            )
            first += length
        self._num_shards += 1


def read(entries: Sequence[Entry], *, longest: int) -> Iterator[Example]:
    """The examples of these entries, cut to so many tokens."""
    for entry in entries:
        stop = entry.first + min(entry.length, longest)
        with safe_open(entry.shard, framework="pt") as file:
            token_ids = file.get_slice("token_ids")[entry.first : stop]
            hidden = file.get_slice("hidden")[entry.first : stop]
        yield Example(
            number=entry.number,
            category=entry.category,
            token_ids=tuple(token_ids.tolist()),
            num_prompt_tokens=entry.num_prompt_tokens,
            hidden=hidden,
        )


def answers(entries: Sequence[Entry], *, longest: int) -> Iterator[Tensor]:
    """The tokens of the answers alone, of examples cut to so many; no hidden state is read."""
    for entry in entries:
        first = entry.first + entry.num_prompt_tokens
        stop = entry.first + min(entry.length, longest)
        with safe_open(entry.shard, framework="pt") as file:
            yield file.get_slice("token_ids")[first:stop]
