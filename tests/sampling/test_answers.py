"""What a step answers does not depend on how many rows are looked at together."""

import pytest
import torch

from cluster.messages import Rule, SamplingSpec, SequenceRows
from cluster.sampling import draw
from cluster.sampling.answers import answers_of
from cluster.sampling.runs import runs_of

VOCAB = 600  # over the tokens that get noise of their own
SPECS = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.01},
)


def step(num_sequences: int) -> list[SequenceRows]:
    """Sequences with no to four certain drafts, of every kind of sampling."""
    return [
        SequenceRows(
            seq_id=number,
            block_table=(number,),
            start=10 + number,
            token_ids=tuple(range(number, number + 1 + number % 5)),
            num_drafts=number % 5,
            sampling=SamplingSpec(seed=number, **SPECS[number % len(SPECS)]),  # type: ignore[arg-type]
        )
        for number in range(num_sequences)
    ]


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("rows_at_once", [1, 4, 7])
def test_rows_are_looked_at_in_any_parts(
    rule: Rule, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and logprobs, a sequence at a time, a few rows, or all together."""
    runs = runs_of(step(40))
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(sum(len(run.rows) for run in runs), VOCAB, generator=generator)
    drafts = [draft for run in runs for draft in (*run.draft_token_ids, 0)]
    logits[torch.arange(len(logits)), drafts] += 6.0  # some of them are kept
    together = answers_of(runs, logits, rule)
    monkeypatch.setattr(draw, "_ELEMENTS_AT_ONCE", rows_at_once * VOCAB)
    assert answers_of(runs, logits, rule) == together
    assert {answer.num_accepted for answer in together} != {0}
