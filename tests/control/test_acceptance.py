"""Which drafts will be kept: learned from what was verified, calibrated, and forgotten."""

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.acceptance import AcceptanceModel
from cluster.control.policy import Outcome
from cluster.messages import Draft

LENGTH = 6


def sigmoid(logit: float) -> float:
    """A chance."""
    return float(1 / (1 + np.exp(-logit)))


def stream(
    model: AcceptanceModel,
    chance: Callable[[int, int, float], float],
    *,
    num_steps: int,
    num_sequences: int = 8,
    seed: int = 0,
    verified: Callable[[tuple[float, ...]], int] = len,
) -> None:
    """Verify drafts whose positions are accepted by chance(sequence, position, margin)."""
    chances = random.Random(seed)
    for _ in range(num_steps):
        outcomes = []
        for seq_id in range(num_sequences):
            margins = tuple(chances.gammavariate(2, 2) for _ in range(LENGTH))
            count = verified(model.survivals(seq_id, "draft", margins))
            accepted = 0
            while accepted < count and chances.random() < chance(
                seq_id, accepted, margins[accepted]
            ):
                accepted += 1
            draft = Draft((0,) * LENGTH, margins=margins, drafter="draft").first(count)
            outcomes.append(Outcome(seq_id=seq_id, draft=draft, num_accepted=accepted))
        model.learn(outcomes)


CHANCES: dict[str, Callable[[int, int, float], float]] = {
    "constant": lambda *_: 0.7,
    "by margin": lambda _seq, _position, margin: sigmoid(0.8 * margin - 2),
    "by position": lambda _seq, position, _margin: 0.9 - 0.12 * position,
    "by sequence": lambda seq_id, *_: 0.3 + 0.08 * seq_id,
    "by all": lambda seq_id, position, margin: sigmoid(
        0.5 * margin - 1 + 0.3 * (seq_id - 4) - 0.2 * position
    ),
    "never": lambda *_: 0.001,
}


@pytest.mark.parametrize("name", sorted(CHANCES))
def test_what_is_predicted_comes_true(name: str) -> None:
    """Calibration error under 0.05 after some 2,000 verified positions, and lower later."""
    model = AcceptanceModel()
    stream(model, CHANCES[name], num_steps=50)
    assert model.num_calibrated > 2000
    assert model.calibration_error < 0.05
    stream(model, CHANCES[name], num_steps=150, seed=1)
    assert model.calibration_error < 0.03


def test_labels_are_not_censored() -> None:
    """Verifying only what is likely to survive leaves the chances of the rest as they are."""
    model = AcceptanceModel()
    stream(
        model,
        CHANCES["by margin"],
        num_steps=200,
        verified=lambda survivals: sum(survival > 0.3 for survival in survivals),
    )
    for margin in (1.0, 3.0, 6.0):
        [survival] = model.survivals(99, "draft", (margin,))
        assert survival == pytest.approx(CHANCES["by margin"](0, 0, margin), abs=0.08)


def test_a_sequence_that_is_unlike_the_others_is_told_apart_in_some_steps() -> None:
    """Its own bias, while the others keep theirs and a new one begins like most."""
    model = AcceptanceModel()
    stream(model, lambda seq_id, *_: 0.1 if seq_id == 0 else 0.9, num_steps=30)
    [odd], [usual], [new] = (model.survivals(seq_id, "draft", (2.0,)) for seq_id in (0, 1, 99))
    assert odd < 0.3
    assert usual > 0.8
    assert new > 0.6


def test_drafters_are_told_apart() -> None:
    """What one drafter's drafts were worth says nothing of another's."""
    model = AcceptanceModel()
    for step in range(60):
        model.observe(step, "good", (2.0,) * 4, 4, 4)
        model.observe(step, "bad", (2.0,) * 4, 0, 4)
    assert model.survivals(999, "good", (2.0,))[0] > 0.9
    assert model.survivals(999, "bad", (2.0,))[0] < 0.1


def test_one_step_may_bring_drafts_of_several_drafters() -> None:
    """Each row of the table is its own drafter's."""
    model = AcceptanceModel()
    for step in range(60):
        model.observe(step, "good", (2.0,) * 4, 4, 4)
        model.observe(step, "bad", (2.0,) * 4, 0, 4)
    drafts = [Draft((1, 2), margins=(2.0, 2.0), drafter=name) for name in ("bad", "good", "bad")]
    table = model.survival_table([1000, 1001, 1002], drafts)
    assert table[1, 0] > 0.9
    assert table[0, 0] < 0.1
    assert table[0, 0] == table[2, 0]


def test_margins_may_be_missing() -> None:
    """Then the position alone decides, as if all margins were 0."""
    model = AcceptanceModel()
    stream(model, CHANCES["by margin"], num_steps=50)
    silent = Draft((1, 2, 3), drafter="draft")
    zeros = Draft((1, 2, 3), margins=(0.0,) * 3, drafter="draft")
    assert (model.survival_table([1], [silent]) == model.survival_table([1], [zeros])).all()


def test_what_is_not_known_is_hoped_for_until_it_is() -> None:
    """Hope is large at first, and small once a sequence was seen often."""
    model = AcceptanceModel()
    draft = [Draft((1,), margins=(2.0,), drafter="draft")]

    def hoped() -> float:
        plain = model.survival_table([0], draft)[0, 0]
        return float(model.survival_table([0], draft, hope=1.0)[0, 0] - plain)

    before = hoped()
    stream(model, CHANCES["constant"], num_steps=100)
    assert before > 0.15
    assert 0 < hoped() < before / 2


def test_nothing_is_kept_of_sequences_that_ended() -> None:
    """A sequence of the same id begins anew."""
    model = AcceptanceModel()
    stream(model, lambda seq_id, *_: 0.1 if seq_id == 0 else 0.9, num_steps=30)
    model.forget(range(8))
    assert model.num_sequences == 0
    assert model.survivals(0, "draft", (2.0,)) == model.survivals(77, "draft", (2.0,))


margins = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(margins, st.integers(0, 64)), max_size=10), margins)
def test_survivals_are_chances_that_fall(
    seen: list[tuple[list[float], int]], asked: list[float]
) -> None:
    """Whatever margins a drafter sends, and whatever was learned from them."""
    model = AcceptanceModel()
    for told, num_accepted in seen:
        model.observe(0, "draft", told, min(num_accepted, len(told)), len(told))
    survivals = model.survivals(0, "draft", asked)
    assert len(survivals) == len(asked)
    assert all(0 <= survival <= 1 for survival in survivals)
    assert all(second <= first for first, second in pairwise(survivals))


def test_what_ended_sequences_were_like_is_expected_of_new_ones() -> None:
    """After ten sequences whose drafts were never kept the next one's are thought no better.

    Nor is much hoped for: they did not differ.
    """
    model, fresh = AcceptanceModel(), AcceptanceModel()
    for seq_id in range(10):
        for _ in range(30):
            draft = Draft((0,), margins=(1.0,), drafter="draft")
            model.learn([Outcome(seq_id=seq_id, draft=draft, num_accepted=0)])
        model.forget([seq_id])
    new = Draft((0,), margins=(1.0,), drafter="draft")
    assert model.survival_table([99], [new])[0, 0] < 0.03
    assert model.survival_table([99], [new], hope=0.5)[0, 0] < 0.06
    assert fresh.survival_table([99], [new])[0, 0] > 0.5


def test_the_more_sequences_differ_the_sooner_one_is_believed() -> None:
    """Five kept drafts say more of a sequence where those before were all good or all bad."""

    def after(population: Callable[[int], bool]) -> float:
        model = AcceptanceModel()
        draft = Draft((0,), margins=(1.0,), drafter="draft")
        for seq_id in range(40):
            for step in range(20):
                kept = population(seq_id) if step % 5 else not population(seq_id)
                model.learn([Outcome(seq_id=seq_id, draft=draft, num_accepted=int(kept))])
            model.forget([seq_id])
        before = model.survival_table([99], [draft])[0, 0]
        for _ in range(5):
            model.learn([Outcome(seq_id=99, draft=draft, num_accepted=1)])
        return float(model.survival_table([99], [draft])[0, 0] - before)

    chances = random.Random(4)
    same = after(lambda _: chances.random() < 0.5)
    assert after(lambda seq_id: seq_id % 2 == 0) > 1.3 * same
