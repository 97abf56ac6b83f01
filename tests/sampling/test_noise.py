"""Noise: uniform, independent along every axis, and a function of its coordinates alone."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cluster.sampling.noise import Stream, gumbel, number, row_keys, uniform

CPU = torch.device("cpu")
N = 400


def grid(*, seed: int = 0, position: int = 0, stream: Stream = Stream.TOKEN) -> np.ndarray:
    """N x N uniforms: N positions from `position` on, by N token ids."""
    keys = row_keys([seed] * N, range(position, position + N), stream, CPU)
    return uniform(keys, torch.arange(N).expand(N, N)).numpy()


def by_seed(first: int) -> np.ndarray:
    """N x N uniforms: N seeds from `first` on, by N token ids, at one position."""
    keys = row_keys(range(first, first + N), [7] * N, Stream.TOKEN, CPU)
    return uniform(keys, torch.arange(N).expand(N, N)).numpy()


def independence_p_value(left: np.ndarray, right: np.ndarray) -> float:
    """Chi-square of pairs over a 16 x 16 grid of equal cells."""
    cells = (left.ravel() * 16).astype(int) * 16 + (right.ravel() * 16).astype(int)
    return float(stats.chisquare(np.bincount(cells, minlength=256)).pvalue)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_each_seed_gives_uniform_numbers(seed: int) -> None:
    """Numbers over positions and tokens fill the unit interval evenly."""
    numbers = grid(seed=seed).ravel()
    assert stats.kstest(numbers, "uniform").pvalue > 0.001
    lowest_bits = (numbers * 2.0**52).astype(np.int64) & 0xFF
    assert stats.chisquare(np.bincount(lowest_bits, minlength=256)).pvalue > 0.001


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbours_are_independent(distance: int) -> None:
    """Tokens, positions and seeds that are close together know nothing of each other."""
    numbers, seeded = grid(), by_seed(0)
    assert independence_p_value(numbers[:, :-distance], numbers[:, distance:]) > 0.001
    assert independence_p_value(numbers[:-distance], numbers[distance:]) > 0.001
    assert independence_p_value(seeded[:-distance], seeded[distance:]) > 0.001
    assert independence_p_value(numbers, numbers.T) > 0.001


@pytest.mark.parametrize(("one", "other"), list(combinations(Stream, 2)))
def test_streams_are_independent(one: Stream, other: Stream) -> None:
    """One use of noise says nothing about another at the same place."""
    assert independence_p_value(grid(stream=one), grid(stream=other)) > 0.001


def test_seed_and_position_are_not_interchangeable() -> None:
    """Seed 3 at position 5 is not seed 5 at position 3, nor is their sum what counts."""
    keys = row_keys([3, 5, 4, 0], [5, 3, 4, 8], Stream.TOKEN, CPU)
    assert len(set(keys.tolist())) == 4


def test_a_sum_of_neighbours_has_the_variance_of_independent_ones() -> None:
    """Sums over 400 tokens, positions or seeds scatter as sums of independent numbers do."""
    for numbers in (grid(seed=9), grid(seed=9).T, by_seed(1000).T):
        variance = float((numbers.sum(axis=1) - N / 2).var() / (N / 12))
        low, high = (float(stats.chi2(N - 1).ppf(q)) / (N - 1) for q in (0.0005, 0.9995))
        assert low < variance < high


@given(seed=st.integers(-(2**64), 2**65), position=st.integers(0, 2**40))
def test_any_seed_counts_modulo_2_to_64(seed: int, position: int) -> None:
    """Every int is a seed; those equal modulo 2**64 are the same one."""
    keys = row_keys([seed, seed + 2**64, seed % 2**64], [position] * 3, Stream.TOKEN, CPU)
    assert len(set(keys.tolist())) == 1


@given(
    seed=st.integers(-(2**64), 2**65),
    position=st.integers(0, 2**40),
    stream=st.sampled_from(Stream),
)
def test_a_number_without_tensors_is_the_same_number(
    seed: int, position: int, stream: Stream
) -> None:
    """Streams of one number a position are read in plain integers, to the same bits."""
    keys = row_keys([seed], [position], stream, CPU)
    expected = uniform(keys, torch.zeros(1, 1, dtype=torch.int64))
    assert number(seed, position, stream) == float(expected)


def test_no_uniform_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the extreme hashes give finite Gumbel noise, different from each other."""
    extremes = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63)])
    monkeypatch.setattr("cluster.sampling.noise._mix", lambda _: extremes.unsqueeze(0))
    numbers = uniform(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))
    assert numbers.tolist()[0][:2] == [2.0**-53, 1 - 2.0**-53]
    noise = gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))
    assert noise.isfinite().all()
    assert noise[0, 1] > 36
    assert noise[0, 0] < -3.6


def test_gumbel_noise_is_gumbel() -> None:
    """The noise has the distribution that makes argmax an exact sample."""
    keys = row_keys([1] * N, range(N), Stream.TOKEN, CPU)
    noise = gumbel(keys, torch.arange(N).expand(N, N)).numpy().ravel()
    assert stats.kstest(noise, "gumbel_r").pvalue > 0.001


def test_the_hash_is_pinned() -> None:
    """The bits are part of what a seed means: they may not change between releases or devices."""
    keys = row_keys([7, 2**63 - 1], [0, 100_000], Stream.REST, CPU)
    assert keys.tolist() == PINNED_KEYS
    numbers = uniform(keys, torch.tensor([[0, 151_935], [1, 2]]))
    assert [[value.hex() for value in row] for row in numbers.tolist()] == PINNED_UNIFORMS


def test_the_hash_is_splitmix64() -> None:
    """Seeded with a known state, the sequence is the published one."""
    state = torch.tensor([1234567])
    words = [reference_splitmix(1234567, index) for index in range(1, 6)]
    assert words[0] == 6457827717110365317  # first output of the reference implementation
    numbers = uniform(state, torch.arange(1, 6).unsqueeze(0))[0].tolist()
    assert numbers == [((word >> 12) + 0.5) * 2.0**-52 for word in words]


def reference_splitmix(state: int, index: int) -> int:
    """Output `index` of SplitMix64 in unbounded integers."""
    mask = 2**64 - 1
    word = (state + index * 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


PINNED_KEYS = [-676041394083133728, 531289122666145028]
PINNED_UNIFORMS = [
    ["0x1.4c570f049738dp-1", "0x1.ab7308b743714p-3"],
    ["0x1.90968e344248dp-1", "0x1.22b7a0e4953e1p-1"],
]
