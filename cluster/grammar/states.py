"""What the grammars of many sequences allow at the rows of a step."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import GrammarFailed, InvalidRequest
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.matcher import Matcher
from cluster.messages import SequenceRows
from cluster.request import Grammar

MAX_STATES = 1024  # sequences whose place is remembered, some 40 KB each


class GrammarStates:
    """Follows every sequence's answer through its grammar. Not for two threads at once.

    A sequence's state is soft: it is found again from the tokens themselves after a preemption,
    in another process, or when it was dropped for others. `make_compiler` is called when the
    first grammar comes.
    """

    def __init__(
        self, make_compiler: Callable[[], GrammarCompiler], *, max_states: int = MAX_STATES
    ) -> None:
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._max_states = max_states
        self._states: OrderedDict[int, tuple[Grammar, Matcher]] = OrderedDict()

    def masks(self, sequence: SequenceRows) -> Tensor | None:
        """What may be drawn at the sampled rows, bool `[num_drafts + 1, vocab]`; None for all.

        Row i stands after the first i drafts. After a draft that the grammar refuses all is
        allowed, since no such row's token is ever emitted. Raises GrammarFailed when this
        sequence cannot go on.
        """
        grammar, sampling = sequence.grammar, sequence.sampling
        if grammar is None or sampling is None:
            return None
        token_ids = (*sequence.history_token_ids, *sequence.token_ids)[sampling.num_prompt_tokens :]
        num_answered = len(token_ids) - sequence.num_drafts
        answer, drafts = token_ids[:num_answered], token_ids[num_answered:]
        try:
            masks = _masks(self._matcher(sequence.seq_id, grammar), answer, drafts)
        except GrammarFailed:
            # It may have been worn out by drafts, or by what came before: once more, from nothing.
            self._states.pop(sequence.seq_id, None)
            self._loaded().forget(grammar)
            masks = _masks(self._matcher(sequence.seq_id, grammar), answer, drafts)
        return torch.from_numpy(masks)

    def _matcher(self, seq_id: int, grammar: Grammar) -> Matcher:
        """The sequence's own matcher, wherever it stands."""
        held = self._states.pop(seq_id, None)
        if held is None or held[0] != grammar:
            try:
                held = grammar, self._loaded().matcher(grammar)
            except InvalidRequest as error:
                raise GrammarFailed(str(error)) from error
        self._states[seq_id] = held
        if len(self._states) > self._max_states:
            self._states.popitem(last=False)
        return held[1]

    def _loaded(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = self._make_compiler()
        return self._compiler


def _masks(matcher: Matcher, answer: Sequence[int], drafts: Sequence[int]) -> NDArray[np.bool_]:
    """A row after the answer and after each draft. Raises GrammarFailed.

    Where the library gives up on a draft, nothing is allowed after it: such a row's token is
    needed only if the draft was right, and then the next step will tell.
    """
    if matcher.follow(answer) < len(answer):
        raise GrammarFailed("the answer so far does not match its grammar")
    rows = [matcher.allowed()]
    others = np.ones_like(rows[0])
    try:
        for draft in drafts:
            if not matcher.take(draft):
                break
            rows.append(matcher.allowed())
    except GrammarFailed:
        others = np.zeros_like(rows[0])
    return np.stack([*rows, *[others] * (len(drafts) + 1 - len(rows))])
