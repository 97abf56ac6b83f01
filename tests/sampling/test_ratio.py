"""The ratio rule, integrated: over all drafts and all noise the target's own distribution is left.

There is no sampling here. Where a function of noise is integrated, its steps are found by
bisection, so the laws hold to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.messages import DraftDistribution
from cluster.sampling import ratio
from cluster.sampling.noise import Stream, number
from cluster.sampling.ratio import (
    RatioNoise,
    draw_drafts,
    drawn,
    emitted,
    keep_probability,
    residual_weights,
    verify_ratio,
)

VOCAB = 5
T = TypeVar("T")
Law = dict[tuple[int, ...], float]
Run = Callable[[float, float], tuple[int, ...]]


def table(seed: int, *, sharp: float = 1.5, num_kept: int = VOCAB) -> Tensor:
    """A model whose distribution depends on the last token: `[VOCAB, VOCAB]`, some of it 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    lowest = logits.topk(num_kept).values[:, -1:]
    return logits.masked_fill(logits < lowest, -torch.inf).softmax(-1)


def shipped(probs: Tensor) -> DraftDistribution:
    """A row as a drafter ships it: what is not 0, best first."""
    token_ids = [int(each) for each in probs.argsort(descending=True) if probs[each] > 0]
    return DraftDistribution(tuple(token_ids), tuple(float(probs[each]) for each in token_ids))


TARGETS = {
    "full": table(1),
    "sharp": table(2, sharp=6.0),
    "filtered": table(3, num_kept=2),
    "greedy": table(4, num_kept=1),
}
DRAFTS = {
    "full": table(5),
    "sharp": table(6, sharp=8.0),
    "filtered": table(7, num_kept=3),
    "greedy": table(8, num_kept=1),
}


def steps(function: Callable[[float], T]) -> Iterator[tuple[T, float]]:
    """(value, width) of each step of a function on (0, 1) that takes no value twice."""
    edges = [2.0**-53, 1 - 2.0**-53]

    def split(low: float, high: float) -> None:
        if function(low) != function(high):
            middle = (low + high) / 2
            if high - low < 2.0**-45:
                edges.append(middle)
                return
            split(low, middle)
            split(middle, high)

    split(*edges)
    for low, high in pairwise(sorted(edges)):
        yield function((low + high) / 2), high - low


def integrated(target: Tensor, drafts: Tensor | None, *, k: int, first: int = 0) -> Law:
    """What `emitted` emits after token `first`, over all drafts and all noise.

    Without `drafts` the draft is (1, 2, ...), certain.
    """
    law: Law = {}
    for chain in product(range(VOCAB), repeat=k):
        before = [first, *chain[:-1]]
        if drafts is None:
            weight = float(chain == tuple(range(1, k + 1)))
            distributions: list[DraftDistribution] = []
        else:
            weight = prod(float(drafts[a, b]) for a, b in zip(before, chain, strict=True))
            distributions = [shipped(drafts[token]) for token in before]
        if weight > 0:
            rows = target[[first, *chain]]
            for tokens, width in outcomes(rows, chain, distributions):
                law[tokens] = law.get(tokens, 0.0) + weight * width
    return law


def outcomes(
    rows: Tensor, chain: Sequence[int], distributions: Sequence[DraftDistribution]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome for one draft, and the measure of the noise that brings it."""
    reached = 1.0
    for row in range(len(chain)):
        run = partial(run_to, rows, chain, distributions, row)
        ends = bool(rows[row + 1].max() == 0)

        def kept(acceptance: float, row: int = row, run: Run = run, *, ends: bool = ends) -> bool:
            tokens = run(acceptance, 0.5)
            return len(tokens) > row + 1 or (ends and tokens[row:] == (chain[row],))

        keep = sum(width for value, width in steps(kept) if value)
        if keep < 1 - 2.0**-40:
            for tokens, width in steps(partial(run, 1 - 2.0**-53)):
                yield tokens, reached * (1 - keep) * width
        reached *= keep
    if reached > 0:
        for tokens, width in steps(partial(run_to, rows, chain, distributions, len(chain), 0.0)):
            yield tokens, reached * width


def run_to(
    rows: Tensor,
    chain: Sequence[int],
    distributions: Sequence[DraftDistribution],
    row: int,
    acceptance: float,
    other: float,
) -> tuple[int, ...]:
    """What is emitted when the drafts before `row` are kept, by its noise and all other."""
    numbers = [0.0] * len(chain)
    numbers[row : row + 1] = [acceptance] * (row < len(chain))
    noise = RatioNoise(numbers, [other] * len(chain), other)
    return tuple(emitted(rows, chain, distributions, noise))


def continued(law: Law, target: Tensor, *, length: int, first: int = 0) -> Law:
    """The law of the first `length` tokens when the target goes on where a step ended."""
    whole: Law = {}
    for tokens in product(range(VOCAB), repeat=length):
        for start, weight in law.items():
            if start == tokens[: len(start)]:
                rest = [(first, *start)[-1], *tokens[len(start) :]]
                going_on = prod(float(target[a, b]) for a, b in pairwise(rest))
                whole[tokens] = whole.get(tokens, 0.0) + weight * going_on
    return whole


def alone(target: Tensor, *, length: int, first: int = 0) -> Law:
    """The law of the target's own first tokens."""
    return {
        tokens: prod(float(target[a, b]) for a, b in pairwise((first, *tokens)))
        for tokens in product(range(VOCAB), repeat=length)
    }


def assert_equal_laws(one: Law, other: Law) -> None:
    for tokens in one.keys() | other.keys():
        assert one.get(tokens, 0.0) == pytest.approx(other.get(tokens, 0.0), abs=1e-12)


@pytest.mark.parametrize("draft", [*DRAFTS, None])
@pytest.mark.parametrize("target", TARGETS)
def test_one_draft_over_all_noise_leaves_the_target(target: str, draft: str | None) -> None:
    """Whatever the draft's distribution, what is emitted is distributed as the target, exactly."""
    target_probs = TARGETS[target]
    draft_probs = None if draft is None else DRAFTS[draft]
    law = integrated(target_probs, draft_probs, k=1)
    assert_equal_laws(continued(law, target_probs, length=2), alone(target_probs, length=2))


@pytest.mark.parametrize(("draft", "k"), [("filtered", 2), (None, 2), (None, 3), ("greedy", 3)])
def test_a_chain_of_drafts_over_all_noise_leaves_the_target(draft: str | None, k: int) -> None:
    """Jointly over all tokens of a step, wherever its first rejection is."""
    target_probs = TARGETS["full"]
    draft_probs = None if draft is None else DRAFTS[draft]
    law = integrated(target_probs, draft_probs, k=k)
    assert max(map(len, law)) == k + 1
    assert_equal_laws(continued(law, target_probs, length=k + 1), alone(target_probs, length=k + 1))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_as_many_drafts_are_kept_as_can_be(target: str, draft: str) -> None:
    """A draft is kept with the mass that both distributions share: no rule keeps more."""
    target_probs, draft_probs = TARGETS[target][0], DRAFTS[draft][0]
    kept = sum(
        q * keep_probability(p, q)
        for p, q in zip(target_probs.tolist(), draft_probs.tolist(), strict=True)
    )
    assert kept == pytest.approx(float(torch.minimum(target_probs, draft_probs).sum()), abs=1e-12)


@pytest.mark.parametrize("target", TARGETS)
def test_certain_drafts_are_exact_one_by_one(target: str) -> None:
    """A draft without a distribution need not be drawn at all: each single one is exact."""
    target_probs = TARGETS[target][0]
    for token_id in range(VOCAB):
        law = dict.fromkeys(range(VOCAB), 0.0)
        for tokens, width in outcomes(TARGETS[target][[0, token_id]], [token_id], []):
            law[tokens[0]] += width
        assert list(law.values()) == pytest.approx(target_probs.tolist(), abs=1e-12)


def test_a_draft_from_outside_its_distribution_is_no_draft() -> None:
    """Rejected for sure, and replaced from the target: exact however often it happens."""
    target_probs, distribution = TARGETS["full"], DraftDistribution((3, 1), (0.75, 0.25))
    law = dict.fromkeys(range(VOCAB), 0.0)
    for tokens, width in outcomes(target_probs[[0, 2]], [2], [distribution]):
        assert len(tokens) == 1
        law[tokens[0]] += width
    assert list(law.values()) == pytest.approx(target_probs[0].tolist(), abs=1e-12)
    assert torch.equal(residual_weights(target_probs[0], 2, distribution), target_probs[0])


def test_a_residual_without_mass_is_the_target() -> None:
    """Where rounding rejects a draft from the target's own distribution something is emitted."""
    target_probs = TARGETS["full"][[0, 0]]
    distribution = shipped(target_probs[0] * (1 + 1e-12))
    noise = RatioNoise([1 - 2**-53], [0.999999], 0.5)
    assert emitted(target_probs, [1], [distribution], noise) == [VOCAB - 1]


@pytest.mark.parametrize("where", [2**-53, 0.5, 1 - 2**-53, 1.0])
def test_a_token_without_weight_is_never_drawn(where: float) -> None:
    """Not even when rounding puts the noise on it, or past the end."""
    weights = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert drawn(weights, where) == [2 if where == 2**-53 else 4]
    assert drawn(weights.zero_(), where) == []


@pytest.mark.parametrize("draft", ["full", "filtered", None])
def test_drafts_that_lead_where_nothing_is_left_are_kept_as_often(draft: str | None) -> None:
    """After tokens 1 and 3 nothing may be drawn: the answer ends there, in its own share."""
    target_probs = TARGETS["full"].clone()
    target_probs[[1, 3]] = 0.0
    law = integrated(target_probs, None if draft is None else DRAFTS[draft], k=2)
    ends = {tokens: weight for tokens, weight in law.items() if tokens[-1] in (1, 3)}
    assert all(1 not in tokens[:-1] and 3 not in tokens[:-1] for tokens in law)
    first = [sum(w for tokens, w in law.items() if tokens[0] == token) for token in range(VOCAB)]
    assert first == pytest.approx(target_probs[0].tolist(), abs=1e-12)
    assert {tokens[0] for tokens in ends if len(tokens) == 1} == {1, 3}
    assert list(integrated(target_probs, None, k=1, first=1)) == [()]


@given(
    seed=st.integers(0, 10**6),
    numbers=st.lists(st.sampled_from([2**-53, 0.25, 0.5, 1 - 2**-53]), min_size=7, max_size=7),
    k=st.integers(0, 3),
)
def test_what_the_target_cannot_draw_is_never_emitted(
    seed: int, numbers: list[float], k: int
) -> None:
    """A token without probability does not come out, at the very ends of the noise either."""
    rows = table(seed, num_kept=2)[: k + 1]
    drafts = table(seed + 1)[:k]
    chain = [int(row.argmax()) for row in drafts]
    noise = RatioNoise(numbers[:k], numbers[3 : 3 + k], numbers[6])
    for distributions in ([], [shipped(row) for row in drafts]):
        tokens = emitted(rows, chain, distributions, noise)
        assert tokens[:-1] == chain[: len(tokens) - 1]
        assert all(rows[row, token] > 0 for row, token in enumerate(tokens))


@given(seed=st.integers(0, 2**64), k=st.integers(0, 4))
def test_a_greedy_target_emits_its_own_tokens(seed: int, k: int) -> None:
    """At temperature 0 both rules are the same: drafts are kept while they are the best tokens."""
    rows = TARGETS["greedy"][: k + 1]
    best = rows.argmax(-1).tolist()
    for wrong in range(k + 1):
        chain = [*best[:wrong], *((token + 1) % VOCAB for token in best[wrong:k])][:k]
        for distributions in ([], [shipped(DRAFTS["full"][0])] * k):
            tokens = verify_ratio(rows, chain, distributions, seed=seed, positions=range(9, 10 + k))
            assert tokens == best[: wrong + 1]


def test_every_use_of_noise_has_its_own_stream_and_position() -> None:
    """Keeping, replacing and the bonus read their stream at the position of their token."""
    rows = TARGETS["full"][[0, 1, 2]]
    distributions = [shipped(DRAFTS["full"][token]) for token in (0, 1)]
    for seed in range(200):
        noise = RatioNoise(
            [number(seed, position, Stream.ACCEPTANCE) for position in (30, 31)],
            [number(seed, position, Stream.RESIDUAL) for position in (30, 31)],
            number(seed, 32, Stream.BONUS),
        )
        expected = emitted(rows, [1, 2], distributions, noise)
        tokens = verify_ratio(rows, [1, 2], distributions, seed=seed, positions=[30, 31, 32])
        assert tokens == expected


@pytest.mark.parametrize(("num_rows", "num_distributions"), [(2, 2), (4, 2), (3, 1), (3, 3)])
def test_parts_that_do_not_fit_are_an_error(num_rows: int, num_distributions: int) -> None:
    """Rows, drafts and distributions belong together, or the caller has mixed up rows."""
    rows, distribution = TARGETS["full"][:num_rows], shipped(DRAFTS["full"][0])
    with pytest.raises(ValueError, match="for 2 drafts"):
        verify_ratio(rows, [1, 2], [distribution] * num_distributions, seed=1, positions=[1, 2, 3])
    with pytest.raises(ValueError, match="at 2 positions"):
        verify_ratio(rows, [1, 2], [], seed=1, positions=[1, 2])


@pytest.mark.parametrize("num_shipped", [2, 3, 64])
@pytest.mark.parametrize("row", range(VOCAB))
def test_drafts_are_drawn_from_just_what_is_shipped(
    row: int, num_shipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measure of noise that draws a token is the probability that goes with it."""
    probs = DRAFTS["filtered"][row : row + 1]
    best = probs[0].topk(min(num_shipped, 3))
    token_ids, mass = best.indices.tolist(), (best.values / best.values.sum()).tolist()

    def place(where: float) -> int:
        monkeypatch.setattr(ratio, "number", lambda *_: where)
        [draft] = draw_drafts(probs, [1], [2], num_shipped=num_shipped)
        assert draft is not None
        assert draft.distribution.token_ids == tuple(token_ids)
        assert draft.distribution.probabilities == pytest.approx(mass, abs=1e-15)
        return token_ids.index(draft.token_id)

    assert dict(steps(place)) == pytest.approx(dict(enumerate(mass)), abs=1e-12)


def test_a_row_without_probability_has_no_draft() -> None:
    """A draft model that leaves nothing, or not a number, drafts nothing there."""
    rows = torch.stack([torch.zeros(VOCAB), torch.full((VOCAB,), torch.nan), torch.eye(VOCAB)[2]])
    nothing, not_a_number, draft = draw_drafts(rows.double(), [1] * 3, [5] * 3)
    assert nothing is None
    assert not_a_number is None
    assert draft == ratio.DrawnDraft(2, DraftDistribution((2,), (1.0,)))


def test_drafts_depend_on_their_own_row_only() -> None:
    """A row's draft is the same alone and in company."""
    rows, seeds, positions = DRAFTS["full"], [3, 4, 5, 6, 7], [9, 8, 7, 6, 5]
    together = draw_drafts(rows, seeds, positions)
    for row in range(VOCAB):
        alone_there = draw_drafts(rows[row : row + 1], [seeds[row]], [positions[row]])
        assert alone_there == [together[row]]
