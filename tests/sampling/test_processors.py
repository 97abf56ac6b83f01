"""Every processor against the slow reference, row by row, and what they do at their edges."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.sampling.draw import distribution, sample
from cluster.sampling.processors import drawable, processed
from tests.sampling.reference import NEVER, reference_logits, reference_probs

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 8
PLAIN = SamplingSpec(seed=0)
token_ids = st.integers(0, VOCAB - 1)
some_ids = st.lists(token_ids, max_size=4, unique=True).map(tuple)
logit = st.floats(-8, 8, width=16)
CHANGES: dict[str, st.SearchStrategy[dict[str, object]]] = {
    "repetition": st.fixed_dictionaries(
        {"repetition_penalty": st.sampled_from([0.5, 0.9, 1.3, 2.0])}
    ),
    "presence": st.fixed_dictionaries(
        {"presence_penalty": st.sampled_from([-2.0, -0.5, 0.7, 2.0])}
    ),
    "frequency": st.fixed_dictionaries({"frequency_penalty": st.sampled_from([-2.0, 0.3, 2.0])}),
    "bias": st.fixed_dictionaries(
        {
            "logit_bias": st.dictionaries(
                token_ids, st.sampled_from([-100.0, -1.5, 0.25, 3.0, 100.0]), max_size=4
            ).map(lambda biases: tuple(biases.items()))
        }
    ),
    "allowed": st.fixed_dictionaries(
        {"allowed_token_ids": st.lists(token_ids, min_size=1, unique=True).map(tuple)}
    ),
    "banned": st.fixed_dictionaries({"banned_token_ids": some_ids}),
    "sequences": st.fixed_dictionaries(
        {
            "banned_sequences": st.lists(
                st.lists(token_ids, min_size=2, max_size=3).map(tuple), max_size=12
            ).map(tuple)
        }
    ),
    "suppressed": st.fixed_dictionaries(
        {"suppressed_token_ids": some_ids, "suppressed_before": st.integers(0, 9)}
    ),
    "grammar": st.just({}),  # its mask comes apart
    "filters": st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
            "top_k": st.sampled_from([0, 0, 1, 3, 5, 50]),
            "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.8]),
            "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        }
    ),
}
Row = tuple[list[float], SamplingSpec, tuple[int, ...], list[bool] | None]


@st.composite
def rows(draw: st.DrawFn, *, only: str | None = None, num_drafts: int = 0) -> list[Row]:
    """One sequence's rows: logits, the spec they share, what is before each, and a mask.

    `only` names the one processor that does something; without it any mix does.
    """
    names = [only] if only else draw(st.lists(st.sampled_from(sorted(CHANGES)), unique=True))
    changes: dict[str, object] = {}
    for name in names:
        changes |= draw(CHANGES[name])
    text = draw(st.lists(token_ids, min_size=1 + num_drafts, max_size=8))
    spec = replace(PLAIN, num_prompt_tokens=draw(st.integers(1, len(text))), **changes)
    spec = replace(spec, seed=draw(st.integers(0, 2**63)))
    masked = draw(st.booleans()) and only in (None, "grammar")
    return [
        (
            draw(st.lists(logit, min_size=VOCAB, max_size=VOCAB)),
            spec,
            tuple(text[: len(text) - num_drafts + row]),
            draw(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)) if masked else None,
        )
        for row in range(num_drafts + 1)
    ]


sequences = st.integers(0, 3).flatmap(lambda num_drafts: rows(num_drafts=num_drafts))
steps = st.lists(sequences, min_size=1, max_size=3).map(
    lambda parts: [row for part in parts for row in part]
)


def arguments(step: list[Row]) -> tuple[Tensor, list[SamplingSpec], list[int]]:
    logits = torch.tensor([values for values, _, _, _ in step])
    return logits, [spec for _, spec, _, _ in step], [len(history) for _, _, history, _ in step]


def extras(step: list[Row]) -> dict[str, object]:
    """Histories and masks of some rows; a row without a mask may draw anything."""
    masks = None
    if any(mask is not None for _, _, _, mask in step):
        masks = torch.tensor([mask or [True] * VOCAB for _, _, _, mask in step])
    return {"histories": [history for _, _, history, _ in step], "masks": masks}


def values_of(row: Row) -> list[float]:
    values, spec, history, mask = row
    return reference_logits(values, spec, len(history), history, mask)


@pytest.mark.parametrize("name", [*CHANGES, None])
@settings(max_examples=50)
@given(data=st.data())
def test_what_is_drawn_from_equals_the_slow_reference(
    data: st.DataObject, name: str | None
) -> None:
    """Each processor alone, and all of them mixed: every entry of the distribution.

    That is so however few tokens are weighed one by one, and it says which rows have none left.
    """
    step = data.draw(rows(only=name, num_drafts=data.draw(st.integers(0, 3))) if name else steps)
    logits, specs, positions = arguments(step)
    before = logits.clone()
    ready = processed(logits, specs, positions, **extras(step))  # type: ignore[arg-type]
    expected = [values_of(row) for row in step]
    assert torch.equal(logits, before)
    torch.testing.assert_close(ready, torch.tensor(expected), atol=1e-4, rtol=1e-5)
    found = drawable(ready, specs, extras(step)["masks"])  # type: ignore[arg-type]
    assert found == [max(values) > NEVER for values in expected]
    depth = data.draw(st.sampled_from([1, 2, 5, VOCAB, 256]))
    probs = distribution(
        logits,
        specs,
        positions,
        num_individual=depth,
        **extras(step),  # type: ignore[arg-type]
    )
    for row, spec, values in zip(probs.tolist(), specs, ready.tolist(), strict=True):
        wanted = reference_probs(values, spec)
        if wanted is not None:
            assert row == pytest.approx(wanted, abs=2e-6)
            assert [value > 0 for value in row] == [value > 0 for value in wanted]


@settings(max_examples=50)
@given(step=steps, data=st.data())
def test_a_row_alone_equals_the_row_among_others(step: list[Row], data: st.DataObject) -> None:
    """Logits, distribution and token of a row are to the last bit those it has without company."""
    logits, specs, positions = arguments(step)
    depth = data.draw(st.sampled_from([2, 256]))
    ready = processed(logits, specs, positions, **extras(step))  # type: ignore[arg-type]
    probs = distribution(logits, specs, positions, num_individual=depth, **extras(step))  # type: ignore[arg-type]
    drawn = sample(logits, specs, positions, num_individual=depth, **extras(step))  # type: ignore[arg-type]
    for index in range(len(step)):
        one = step[index : index + 1]
        alone = arguments(one)
        assert torch.equal(processed(*alone, **extras(one))[0], ready[index])  # type: ignore[arg-type]
        own = distribution(*alone, num_individual=depth, **extras(one))  # type: ignore[arg-type]
        assert torch.equal(own[0], probs[index])
        assert sample(*alone, num_individual=depth, **extras(one)) == [drawn[index]]  # type: ignore[arg-type]


@given(step=steps)
def test_what_is_drawn_has_a_probability(step: list[Row]) -> None:
    """No draw is ever of a token that a processor forbade or a filter removed."""
    logits, specs, positions = arguments(step)
    probs = distribution(logits, specs, positions, num_individual=3, **extras(step))  # type: ignore[arg-type]
    drawn = sample(logits, specs, positions, num_individual=3, **extras(step))  # type: ignore[arg-type]
    for row, token_id in zip(probs.tolist(), drawn, strict=True):
        assert row[token_id] > 0 or max(row) == 0


def test_nothing_to_do_costs_nothing() -> None:
    """Specs that change no logit give back the tensor itself."""
    logits = torch.zeros(3, VOCAB)
    late = replace(PLAIN, suppressed_token_ids=(1,), suppressed_before=5)
    assert processed(logits, [PLAIN, PLAIN, late], [0, 1, 5]) is logits


def test_suppressed_ids_are_impossible_before_their_position_only() -> None:
    """min_tokens keeps an id away until the position it names, in any order of the rows."""
    spec = replace(PLAIN, suppressed_token_ids=(1, 3), suppressed_before=10)
    ready = processed(torch.zeros(2, 4), [spec, spec], [10, 9])
    assert ready.tolist() == [[0, 0, 0, 0], [0, NEVER, 0, NEVER]]


def test_a_missing_history_is_refused() -> None:
    """Penalties without the text they count would silently be none."""
    with pytest.raises(ValueError, match="needs histories"):
        processed(torch.zeros(1, 4), [replace(PLAIN, presence_penalty=1.0)], [3])


def test_ids_beyond_the_vocabulary_are_without_effect() -> None:
    """A draft model of fewer tokens takes the target's specs and histories as they are."""
    spec = replace(
        PLAIN,
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias=((1, 2.0), (99, 5.0)),
        allowed_token_ids=(0, 1, 2, 98),
        banned_token_ids=(2, 97),
        banned_sequences=((7, 96), (5, 95)),
        suppressed_token_ids=(94,),
        suppressed_before=50,
        num_prompt_tokens=1,
    )
    ready = processed(torch.ones(1, 4), [spec], [3], histories=[(95, 1, 96)])
    assert ready.tolist() == [[1.0, 3 / 2 - 1, NEVER, NEVER]]


def test_presence_and_frequency_count_the_answer_only() -> None:
    """A token of the prompt costs nothing, one that came three times costs three times."""
    spec = replace(PLAIN, presence_penalty=1.0, frequency_penalty=0.5, num_prompt_tokens=2)
    ready = processed(torch.zeros(1, 4), [spec], [7], histories=[(0, 1, 2, 2, 3, 2, 1)])
    assert ready.tolist() == [[0.0, -1.5, -2.5, -1.5]]


def test_a_banned_sequence_may_begin_in_the_prompt() -> None:
    """What stands before decides, whoever wrote it; a beginning that is not whole does not."""
    spec = replace(
        PLAIN, banned_sequences=((1, 2, 3), (2, 0), (9, 9, 9, 9, 2, 1)), num_prompt_tokens=2
    )
    histories = [(1, 2), (2,), (1, 1), ()]
    ready = processed(torch.zeros(4, 4), [spec] * 4, [2, 1, 2, 0], histories=histories)
    assert ready.tolist() == [[NEVER, 0, 0, NEVER], [NEVER, 0, 0, 0], [0] * 4, [0] * 4]


@pytest.mark.parametrize("penalty", [1e-320, 1e-30, 1e30, 1e300])
def test_the_wildest_penalty_stays_in_range(penalty: float) -> None:
    """No penalty makes a logit infinite, which would make the whole row undefined."""
    spec = replace(PLAIN, repetition_penalty=penalty)
    logits = torch.tensor([[3.0, -2.0, 0.0, NEVER]])
    ready = processed(logits, [spec], [4], histories=[(0, 1, 2, 3)])
    assert ready[0, :3].isfinite().all()
    assert ready[0, 3] == NEVER
    assert math.isclose(float(distribution(ready, [PLAIN], [4]).sum()), 1.0)


def test_a_row_with_nothing_left_says_so_and_harms_nobody() -> None:
    """Under every filter it is found and has no distribution, and its neighbour keeps its own."""
    empty = replace(PLAIN, allowed_token_ids=(1,), banned_token_ids=(1,))
    for changes in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.3}, {"temperature": 0.0}):
        specs = [replace(empty, **changes), replace(PLAIN, **changes)]
        logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
        ready = processed(logits, specs, [1, 1])
        assert drawable(ready, specs) == [False, True]
        probs = distribution(logits, specs, [1, 1], num_individual=2)
        assert probs[0].tolist() == [0] * 4
        assert math.isclose(float(probs[1].sum()), 1.0)
        alone = sample(logits[1:], specs[1:], [1], num_individual=2)
        assert sample(logits, specs, [1, 1], num_individual=2)[1:] == alone


def test_an_answer_is_penalised_token_by_token() -> None:
    """Mutant check: rows of one draft differ because each counts the drafts before it."""
    spec = replace(PLAIN, temperature=0.0, frequency_penalty=2.0, num_prompt_tokens=1)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 4)
    histories = [(0,), (0, 1), (0, 1, 1), (0, 1, 1, 2)]
    assert sample(logits, [spec] * 4, [1, 2, 3, 4], histories=histories) == [1, 2, 2, 3]
