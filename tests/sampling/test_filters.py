"""The filters against a slow reference in plain Python, and their tie rules."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from cluster.messages import SamplingSpec
from cluster.sampling.filters import kept_mask, kept_sizes, rank, rank_anywhere, tempered
from cluster.sampling.processors import processed

NEVER = -math.inf
logit = st.floats(-8, 8, width=16)  # so coarse that ties are common
rows_of_logits = st.lists(st.lists(logit, min_size=12, max_size=12), min_size=1, max_size=5)


@st.composite
def specs(draw: st.DrawFn) -> SamplingSpec:
    """Any mix of filters, each of them often off."""
    return SamplingSpec(
        seed=draw(st.integers(0, 2**63 - 1)),
        temperature=draw(st.sampled_from([0.3, 0.6, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3, 7, 12, 50])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.8, 0.95])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.5, 1.0])),
        suppressed_token_ids=tuple(draw(st.lists(st.integers(0, 11), max_size=4))),
        suppressed_before=draw(st.sampled_from([0, 10])),
    )


def reference_kept(logits: Sequence[float], spec: SamplingSpec, position: int) -> list[int]:
    """The ids that can be drawn, best first; skips the example if rounding could decide."""
    suppressed = spec.suppressed_token_ids if position < spec.suppressed_before else ()
    scaled = [
        NEVER if token_id in suppressed else value / spec.temperature
        for token_id, value in enumerate(logits)
    ]
    highest = max(scaled)
    weights = [math.exp(value - highest) for value in scaled]
    ranked = sorted(range(len(logits)), key=lambda token_id: (-scaled[token_id], token_id))
    ranked = ranked[: spec.top_k or len(logits)]
    total = math.fsum(weights[token_id] for token_id in ranked)
    kept, mass = [], 0.0
    for token_id in ranked:
        assume(spec.top_p == 1 or abs(mass / total - spec.top_p) > 1e-5)
        assume(spec.min_p in (0, 1) or abs(weights[token_id] - spec.min_p) > 1e-5)
        in_top_p = spec.top_p == 1 or mass < spec.top_p * total
        if in_top_p and weights[token_id] >= spec.min_p and weights[token_id] > 0:
            kept.append(token_id)
        mass += weights[token_id]
    return kept


@given(logits=rows_of_logits, data=st.data(), depth=st.integers(1, 14))
def test_what_is_kept_equals_the_slow_reference(
    logits: list[list[float]], data: st.DataObject, depth: int
) -> None:
    """Rows of different specs side by side keep exactly their own reference's tokens, in order.

    A ranking too shallow to tell says so, and never says anything wrong; the mask of a whole row
    always tells.
    """
    row_specs = [data.draw(specs()) for _ in logits]
    positions = [data.draw(st.sampled_from([9, 10])) for _ in logits]
    suppressed = processed(torch.tensor(logits), row_specs, positions)
    ranked = rank(suppressed, depth)
    all_log_probs = tempered(suppressed, row_specs)
    log_probs = all_log_probs.gather(-1, ranked)
    for row, size in enumerate(kept_sizes(log_probs, row_specs, 12)):
        expected = reference_kept(logits[row], row_specs[row], positions[row])
        kept = kept_mask(suppressed[row], all_log_probs[row], row_specs[row])
        kept &= all_log_probs[row] > NEVER
        assert kept.nonzero().flatten().tolist() == sorted(expected)
        if size is None:
            assert depth < 12
            continue
        drawable = ranked[row, :size][log_probs[row, :size] > NEVER].tolist()
        assert drawable == expected[:depth]
        assert size > depth or len(drawable) == len(expected)


@pytest.mark.parametrize("ranking", [rank, rank_anywhere])
@given(
    levels=st.lists(st.integers(-3, 3), min_size=7, max_size=7),
    num_forbidden=st.integers(0, 90),
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 120),
)
def test_ranking_is_by_logit_then_id(
    ranking: Callable[[Tensor, int], Tensor],
    levels: list[int],
    num_forbidden: int,
    seed: int,
    depth: int,
) -> None:
    """A ranking of any depth is a prefix of the one total order, ties included, by either way."""
    rng = random.Random(seed)
    rows = [rng.choices(levels, k=100) for _ in range(3)]
    for row in rows:
        for place in rng.sample(range(100), num_forbidden):
            row[place] = NEVER  # type: ignore[call-overload]
    ranked = ranking(torch.tensor(rows, dtype=torch.float32), depth).tolist()
    for values, token_ids in zip(rows, ranked, strict=True):
        expected = sorted(range(100), key=lambda token_id: (-values[token_id], token_id))
        assert token_ids == expected[:depth]


@pytest.mark.parametrize("ranking", [rank, rank_anywhere])
@pytest.mark.parametrize("depth", [4, 256])
def test_ties_at_the_last_rank_go_to_the_lowest_ids(
    ranking: Callable[[Tensor, int], Tensor], depth: int
) -> None:
    """Of a vocabulary that is level beyond one token, the lowest ids are in, in every row."""
    values = torch.zeros(3, 5000)
    values[:, 4321] = 1.0
    assert ranking(values, depth).tolist() == [[4321, *range(depth - 1)]] * 3


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    """With halves and quarters, exactly the sum that reaches p is kept, and one token at least."""
    log_probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    sizes = {
        top_p: kept_sizes(log_probs, [SamplingSpec(seed=0, top_p=top_p)], 4)
        for top_p in (1e-9, 0.49, 0.51, 0.74, 0.76, 0.99)
    }
    assert sizes == {1e-9: [1], 0.49: [1], 0.51: [2], 0.74: [2], 0.76: [3], 0.99: [4]}


def test_top_p_is_a_share_of_what_top_k_kept() -> None:
    """The order of the filters is fixed: 0.6 of the top two is one token, 0.6 of all is two."""
    log_probs = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    both = SamplingSpec(seed=0, top_k=2, top_p=0.6)
    alone = SamplingSpec(seed=0, top_p=0.55)
    assert kept_sizes(log_probs, [both], 4) == [1]
    assert kept_sizes(log_probs, [alone], 4) == [2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45, 5e-324])
def test_the_smallest_temperatures_do_not_overflow(temperature: float) -> None:
    """However cold, the best token has all the probability and nothing is NaN."""
    logits = torch.tensor([[3.0, 1000.0, -1000.0, NEVER]])
    log_probs = tempered(logits, [SamplingSpec(seed=0, temperature=temperature)])
    assert log_probs.exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_temperature_scales_before_the_softmax() -> None:
    """Tempered log-probs are those of logits divided by the temperature, row by row."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row_specs = [SamplingSpec(seed=0, temperature=t) for t in (0.5, 1.0, 2.0)]
    expected = (logits / torch.tensor([[0.5], [1.0], [2.0]])).log_softmax(-1)
    torch.testing.assert_close(tempered(logits, row_specs), expected)
