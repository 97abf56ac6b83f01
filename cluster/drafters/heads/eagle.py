"""EAGLE (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840): one layer that drafts token by token.

Its row i is made of a token and of the hidden state of the position before it:

    row             0       1       2       3          4
    token           t1      t2      t3      d0         d1         t: settled, d: drafted
    hidden state    h0      h1      h2      f2         f3         h: the target's, f: its own
    says            -       -       d0      d1         d2

What the layer returns is both what the next token is drawn from and the next row's hidden state. In
the next exchange the target has computed h3 on, and the rows from there on are replaced.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cluster.drafters.heads.layer import DraftLayer
from cluster.drafters.heads.model import Known
from cluster.models.decoder import Segment
from cluster.models.hidden import HiddenWanted
from cluster.models.linear import at_least_two

MAX_ROWS = 256  # of one sequence in a pass


class Fusion(Protocol):
    """Where the versions differ."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs it reads; none for the state after the final norm."""
        ...

    def features(self, rows: Tensor) -> Tensor:
        """The target's hidden states, `[rows, width]`, as the layer has its own."""
        ...

    def inputs(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into the layer, and what its attention is added to. Two rows or more."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]` of the target's vocabulary, float32."""
        ...


class EagleHead:
    """A fusion and a layer, as a `Head`. Every slot holds the rows of one sequence.

    Where the target has not kept the hidden states of the beginning of a sequence (it took it from
    its prefix cache), the rows begin later.
    """

    def __init__(
        self, fusion: Fusion, layer: DraftLayer, *, num_sequences: int, context: int, max_draft: int
    ) -> None:
        self._fusion = fusion
        self._layer = layer
        self._num_sequences = num_sequences
        self._context = context
        self._max_draft = max_draft
        self._origins = [0] * num_sequences  # the position of row 0, by slot

    @property
    def wanted(self) -> HiddenWanted:
        """All positions' states: those of a long prompt are read when it is first drafted for."""
        return HiddenWanted(
            num_sequences=self._num_sequences, num_rows=self._context, layers=self._fusion.layers
        )

    @property
    def context_limit(self) -> int:
        """Rows in a slot."""
        return self._context

    @property
    def max_draft(self) -> int:
        """No limit but the one given."""
        return self._max_draft

    def begin(self, sequences: Sequence[Known]) -> Tensor:
        """What the layer returns for each one's last row, `[sequences, hidden]`."""
        segments: list[Segment] = []
        token_ids: list[int] = []
        rows: list[Tensor] = []
        last_rows: list[int] = []
        for known in sequences:
            if known.is_new:
                self._origins[known.slot] = known.start
            first = self._read_ahead(known)
            segments.append(self._segment(known.slot, first, known.stop))
            token_ids += known.token_ids[first + 1 :]
            rows.append(known.rows(first, known.stop))
            last_rows.append(len(token_ids) - 1)
        features = self._fusion.features(torch.cat(rows))
        return self._pass(token_ids, features, segments)[last_rows]

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """The same for every depth."""
        del depth
        return self._fusion.logits(state)

    def follow(
        self, state: Tensor, slots: Sequence[int], positions: Sequence[int], drawn: Sequence[int]
    ) -> Tensor:
        """One more row each: the token drawn, and what the layer returned for the one before."""
        segments = [
            self._segment(slot, position - 1, position)
            for slot, position in zip(slots, positions, strict=True)
        ]
        return self._pass(drawn, state, segments)

    def _read_ahead(self, known: Known) -> int:
        """Read long arrears but for the last rows, by themselves; returns the first row left."""
        first = known.start
        while known.stop - first > MAX_ROWS:
            end = first + MAX_ROWS
            self._pass(
                known.token_ids[first + 1 : end + 1],
                self._fusion.features(known.rows(first, end)),
                [self._segment(known.slot, first, end)],
            )
            first = end
        return first

    def _segment(self, slot: int, start: int, stop: int) -> Segment:
        """Positions of hidden states as rows of a slot."""
        return Segment((slot,), start - self._origins[slot], stop - start)

    def _pass(
        self, token_ids: Sequence[int], features: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=features.device)
        rows, residual = self._fusion.inputs(at_least_two(tokens), at_least_two(features))
        return self._layer(rows, residual, self._layer.plan(segments))[: len(token_ids)]
