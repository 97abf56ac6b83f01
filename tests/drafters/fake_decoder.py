"""A decoder without arithmetic that remembers, slot by slot, on what each position was computed."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from cluster.messages import Rule, SamplingSpec
from cluster.models.decoder import Segment
from cluster.models.kv_cache import KVCache
from cluster.sampling.propose import propose
from cluster.sampling.ratio import DrawnDraft
from cluster.tools.bench.timed import smallest_spec

VOCAB_SIZE = 8
CONTEXT = 48


class FakeDecoder:
    """Its hidden state is a number that stands for the whole prefix, its logits are drawn from it.

    A forward pass over a slot whose earlier positions hold anything but this prefix fails.
    """

    def __init__(self) -> None:
        self.spec = smallest_spec(vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.num_passes = 0
        self._states: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}

    def forward(self, token_ids: Tensor, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """`[num_tokens, 1]`: the state after each row."""
        assert cache.block_size >= CONTEXT
        self.num_passes += 1
        rows = iter(token_ids.tolist())
        states: list[int] = []
        for segment in segments:
            [slot] = segment.block_table
            for position in range(segment.start):
                known = self._states.get((slot, position - 1), 0)
                assert self._before[slot, position] == known, "keys and values of another text"
            state = self._states.get((slot, segment.start - 1), 0)
            for position in range(segment.start, segment.start + segment.num_rows):
                self._before[slot, position] = state
                state = self._states[slot, position] = after(state, next(rows))
                states.append(state)
        return torch.tensor(states).unsqueeze(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]`."""
        return torch.stack([logits_of(int(state)) for state in hidden[:, 0]])


def after(state: int, token_id: int) -> int:
    """What a prefix and one more token amount to."""
    return (state * 6364136223846793005 + token_id * 2862933555777941757 + 3037000493) % 2**62


@cache
def logits_of(state: int) -> Tensor:
    """What may follow a prefix: a few likely tokens."""
    generator = torch.Generator().manual_seed(state)
    return torch.randn(VOCAB_SIZE, generator=generator) * 3


def fresh(
    token_ids: Sequence[int], sampling: SamplingSpec, rule: Rule, num_tokens: int
) -> list[DrawnDraft]:
    """What a model that knows nothing but this text drafts, one token at a time."""
    state, position = 0, len(token_ids)
    for token_id in token_ids:
        state = after(state, token_id)
    drafted: list[DrawnDraft] = []
    for _ in range(num_tokens):
        drafted.append(_drawn(state, position, sampling, rule))
        state, position = after(state, drafted[-1].token_id), position + 1
    return drafted


@cache
def _drawn(state: int, position: int, sampling: SamplingSpec, rule: Rule) -> DrawnDraft:
    [drawn] = propose(
        logits_of(state).unsqueeze(0), [sampling], [position], histories=[()], rule=rule
    )
    assert drawn is not None
    return drawn
