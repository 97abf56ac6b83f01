"""Drawing: seeds decide, filters hold, the bucket is exact, and neighbours do not matter."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cluster.messages import SamplingSpec
from cluster.sampling import draw, processors
from cluster.sampling.draw import sample
from cluster.sampling.filters import kept_sizes, rank, tempered
from cluster.sampling.logprobs import token_log_probs
from tests.sampling.reference import reference_logits, reference_probs

rows_of_logits = st.lists(
    st.lists(st.floats(-8, 8, width=16), min_size=12, max_size=12), min_size=1, max_size=5
)


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0) -> torch.Tensor:
    """Rows of falling peakedness, so that some have little beyond the top and some a lot."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    return logits * torch.linspace(5, 1, num_rows).unsqueeze(-1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


# --- what a single row promises


@given(logits=rows_of_logits, seed=st.integers(0, 2**63 - 1), position=st.integers(0, 10**6))
def test_greedy_is_argmax_with_the_lowest_id_on_a_tie(
    logits: list[list[float]], seed: int, position: int
) -> None:
    """Temperature 0 and top_k 1 draw the best token, however close the next one is."""
    best = [row.index(max(row)) for row in logits]
    rows, positions = torch.tensor(logits), [position] * len(logits)
    greedy = SamplingSpec(seed=seed, temperature=0.0)
    first = SamplingSpec(seed=seed, temperature=1.3, top_k=1)
    assert sample(rows, [greedy] * len(logits), positions) == best
    assert sample(rows, [first] * len(logits), positions) == best


@given(
    logits=st.lists(st.integers(-8, 8), min_size=12, max_size=12, unique=True),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_temperature_near_0_is_argmax(logits: list[int], seed: int) -> None:
    """Sampling tends to greedy as the temperature falls."""
    cold = SamplingSpec(seed=seed, temperature=0.01)
    assert sample(torch.tensor([logits]).float(), [cold], [0]) == [logits.index(max(logits))]


@given(
    logits=rows_of_logits,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 5.0]),
    suppressed=st.lists(st.integers(0, 11), max_size=11).map(tuple),
    num_individual=st.sampled_from([1, 3, 256]),
)
def test_a_suppressed_id_is_never_drawn(
    logits: list[list[float]],
    seed: int,
    temperature: float,
    suppressed: tuple[int, ...],
    num_individual: int,
) -> None:
    """At any temperature, with or without a rest bucket, min_tokens holds."""
    spec = SamplingSpec(
        seed=seed,
        temperature=temperature,
        suppressed_token_ids=suppressed,
        suppressed_before=100,
    )
    rows = torch.tensor(logits)
    for position in (1, 99):
        drawn = sample(
            rows, [spec] * len(logits), [position] * len(logits), num_individual=num_individual
        )
        assert not set(drawn) & set(suppressed)


@given(
    seed=st.integers(0, 2**63 - 1),
    top_k=st.sampled_from([0, 2, 40, 90]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    num_individual=st.sampled_from([2, 5, 256]),
)
def test_only_kept_tokens_are_drawn(
    seed: int, top_k: int, top_p: float, min_p: float, num_individual: int
) -> None:
    """Filters hold beyond the individually weighed tokens too, where a deeper look is needed."""
    logits = random_logits(8, 120, seed=3)
    spec = SamplingSpec(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    ranked = rank(logits, 120)
    sizes = kept_sizes(tempered(logits, [spec] * 8).gather(-1, ranked), [spec] * 8, 120)
    drawn = sample(logits, [spec] * 8, range(8), num_individual=num_individual)
    for row, (token_id, size) in enumerate(zip(drawn, sizes, strict=True)):
        assert token_id in ranked[row, :size].tolist()


def test_seed_and_position_decide() -> None:
    """The same seed and position give the same token again; another seed or position others."""
    logits = random_logits(1, 300).expand(200, -1) * 0.1
    one = [SamplingSpec(seed=7)] * 200
    first = sample(logits, one, range(200))
    assert sample(logits, one, range(200)) == first
    assert sample(logits, [SamplingSpec(seed=8)] * 200, range(200)) != first
    assert len(set(first)) > 50


# --- exactness of the bucket


def drawn_counts(
    logits: torch.Tensor, spec: dict[str, float], *, num_draws: int, num_individual: int
) -> np.ndarray:
    """How often each token is drawn from one row under many seeds."""
    tokens: list[int] = []
    for first in range(0, num_draws, 2500):
        specs = [SamplingSpec(seed=seed, **spec) for seed in range(first, first + 2500)]
        rows = logits.expand(2500, -1)
        tokens += sample(rows, specs, [3] * 2500, num_individual=num_individual)
    return np.bincount(tokens, minlength=logits.shape[-1])


def fit(counts: np.ndarray, probs: torch.Tensor) -> float:
    """Chi-square's p-value; cells expected under five times are pooled, 0 for the impossible."""
    expected = probs.double().numpy() / float(probs.double().sum()) * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    pooled = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed[pooled > 0], pooled[pooled > 0]).pvalue)


BUCKET_CASES: list[tuple[int, int, dict[str, float], int]] = [
    (8, 3, {}, 30_000),
    (8, 1, {"temperature": 0.6}, 30_000),
    (600, 16, {}, 30_000),
    (600, 16, {"top_k": 100}, 2_500),
    (600, 16, {"top_p": 0.9}, 2_500),
]


def probs_of(logits: torch.Tensor, spec: dict[str, float]) -> torch.Tensor:
    """The distribution one row should be drawn from, in float64."""
    probs = (logits[0].double() / spec.get("temperature", 1.0)).softmax(-1)
    ranked, order = probs.sort(descending=True, stable=True)
    kept = torch.arange(len(probs)) < (spec.get("top_k") or len(probs))
    kept &= (ranked.cumsum(-1) - ranked) < spec.get("top_p", 1.0)
    return torch.zeros_like(probs).scatter(0, order, ranked * kept)


@pytest.mark.parametrize(("vocab_size", "num_individual", "spec", "num_draws"), BUCKET_CASES)
def test_x05_the_rest_bucket_is_exact(
    vocab_size: int, num_individual: int, spec: dict[str, float], num_draws: int
) -> None:
    """With most of the vocabulary in one bucket, every token still has its own probability."""
    logits = random_logits(1, vocab_size, seed=1) / 3
    probs = probs_of(logits, spec)
    top = probs.topk(num_individual).values.sum() / probs.sum()
    assert top < 0.8  # otherwise this would not test the bucket
    counts = drawn_counts(logits, spec, num_draws=num_draws, num_individual=num_individual)
    assert fit(counts, probs) > 0.001


PROCESSED: dict[str, dict[str, object]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": -1.0, "frequency_penalty": 0.7},
    "bias": {"logit_bias": ((2, 1.5), (5, -100.0))},
    "allowed": {"allowed_token_ids": (0, 2, 3, 7), "top_p": 0.95},
    "banned": {"banned_token_ids": (1,), "banned_sequences": ((4, 2), (3, 3))},
    "all": {
        "temperature": 0.8,
        "min_p": 0.02,
        "top_k": 6,
        "repetition_penalty": 0.7,
        "frequency_penalty": 0.2,
        "logit_bias": ((0, 0.5),),
        "suppressed_token_ids": (7,),
        "suppressed_before": 9,
    },
}
HISTORY = (1, 2, 2, 3, 4)


def drawn_and_expected(name: str) -> tuple[np.ndarray, torch.Tensor]:
    """How often each token is drawn under many seeds, and what the slow reference expects."""
    logits = random_logits(1, 8, seed=1) / 3
    specs = [
        SamplingSpec(seed=seed, num_prompt_tokens=2, **PROCESSED[name])  # type: ignore[arg-type]
        for seed in range(5_000)
    ]
    rows, positions = logits.expand(5_000, -1), [len(HISTORY)] * 5_000
    tokens = sample(rows, specs, positions, histories=[HISTORY] * 5_000, num_individual=3)
    values = reference_logits(logits[0].tolist(), specs[0], len(HISTORY), HISTORY)
    probs = reference_probs(values, specs[0])
    assert probs is not None
    return np.bincount(tokens, minlength=8), torch.tensor(probs, dtype=torch.float64)


@pytest.mark.parametrize("name", PROCESSED)
def test_x05_draws_follow_every_processor(name: str) -> None:
    """The draw, with its bucket, is of just the distribution that the processors leave."""
    assert fit(*drawn_and_expected(name)) > 0.001


@pytest.mark.parametrize("name", ["repetition", "presence and frequency", "all"])
def test_x05_a_penalty_that_is_left_out_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The check fails when a penalty does nothing."""
    monkeypatch.setattr(processors, "penalize", lambda *_: None)
    assert fit(*drawn_and_expected(name)) < 1e-9


@pytest.mark.parametrize(
    ("mutant", "value"),
    [
        ("_log_mass", lambda rest: rest.amax(-1, keepdim=True).double()),
        ("_draw_within", lambda rest, _: rest.argmax(-1).tolist()),
    ],
)
def test_x05_a_wrong_bucket_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: str, value: object
) -> None:
    """The check fails when the bucket's mass, or the draw inside it, is not what it should be."""
    monkeypatch.setattr(draw, mutant, value)
    logits = random_logits(1, 8, seed=1) / 3
    counts = drawn_counts(logits, {}, num_draws=5_000, num_individual=3)
    assert fit(counts, probs_of(logits, {})) < 1e-9


def test_x05_noise_shared_between_the_stages_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails when the draw inside the bucket reuses noise that decided before."""
    keys = draw.row_keys
    monkeypatch.setattr(draw, "row_keys", lambda s, p, _, d: keys(s, p, draw.Stream.TOKEN, d))
    logits = torch.zeros(1, 8)
    counts = drawn_counts(logits, {}, num_draws=5_000, num_individual=1)
    assert fit(counts, probs_of(logits, {})) < 1e-9


def test_a_bucket_of_impossible_tokens_never_wins() -> None:
    """Tokens beyond the individual ones may all have probability 0."""
    logits = torch.full((200, 50), -torch.inf)
    logits[:, [4, 30]] = 0.0
    specs = [SamplingSpec(seed=seed) for seed in range(200)]
    assert set(sample(logits, specs, [0] * 200, num_individual=2)) == {4, 30}
    assert set(sample(logits, specs, [0] * 200, num_individual=10)) == {4, 30}


def test_a_nucleus_far_beyond_the_individual_tokens_is_exact() -> None:
    """A level distribution under top_p 0.5 keeps exactly the lower half of the ids."""
    logits = torch.zeros(64, 10_000)
    specs = [SamplingSpec(seed=seed, top_p=0.5) for seed in range(64)]
    drawn = sample(logits, specs, [0] * 64)
    assert max(drawn) < 5_001
    assert max(drawn) > 4_000
    assert len(set(drawn)) > 55


# --- neighbours and threads

MIXED = (
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.5, "min_p": 0.02},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "suppressed_token_ids": (3, 5), "suppressed_before": 10**6},
    {"temperature": 0.0, "suppressed_token_ids": (3, 5), "suppressed_before": 10**6},
)


@pytest.mark.parametrize("vocab_size", [49152, 152064, 50257, 32769, 1021])
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(vocab_size: int) -> None:
    """Alone, among 2, 8 or 17 rows, with 1 or 2 threads: the same token, the same logprob bits."""
    logits = random_logits(17, vocab_size)
    specs = [SamplingSpec(seed=row, **MIXED[row % len(MIXED)]) for row in range(17)]  # type: ignore[arg-type]
    positions = [100 + row for row in range(17)]
    with threads(2):
        expected = sample(logits, specs, positions)
        expected_log_probs = token_log_probs(logits, expected)
    for count in (1, 2):
        for size in (1, 2, 8):
            first = (count * size) % 3
            rows = slice(first, first + size)
            with threads(count):
                some = logits[rows].clone()
                assert sample(some, specs[rows], positions[rows]) == expected[rows]
                assert token_log_probs(some, expected[rows]) == expected_log_probs[rows]
    with threads(1):
        assert sample(logits, specs, positions) == expected
        assert token_log_probs(logits, expected) == expected_log_probs


@pytest.mark.parametrize("vocab_size", [49152, 50257])
def test_every_intermediate_has_the_same_bits_alone(vocab_size: int) -> None:
    """Log-probs, rankings, bucket masses and noise are equal to the last bit, not just tokens."""
    logits = random_logits(9, vocab_size)
    specs = [SamplingSpec(seed=row, temperature=0.7) for row in range(9)]

    def intermediates(rows: slice) -> list[torch.Tensor]:
        log_probs = tempered(logits[rows].clone(), specs[rows])
        ranked = rank(logits[rows].clone(), 255)
        keys = draw.row_keys(
            [spec.seed for spec in specs[rows]], range(9)[rows], draw.Stream.TOKEN, keys_device
        )
        return [
            log_probs,
            ranked,
            log_probs.gather(-1, ranked).double().exp().cumsum(-1),
            draw._log_mass(log_probs),
            draw.gumbel(keys, ranked),
        ]

    keys_device = torch.device("cpu")
    with threads(2):
        together = intermediates(slice(0, 9))
    for count in (1, 2):
        for first, last in ((0, 1), (4, 5), (7, 9), (1, 9)):
            with threads(count):
                some = intermediates(slice(first, last))
            for whole, part in zip(together, some, strict=True):
                assert torch.equal(whole[first:last], part)


def test_logprobs_are_of_the_unprocessed_distribution() -> None:
    """Whatever the spec filtered, the logprob is that of the logits as they were."""
    logits = random_logits(3, 40)
    expected = logits.double().log_softmax(-1)[[0, 1, 2], [5, 0, 39]].tolist()
    assert token_log_probs(logits, [5, 0, 39]) == pytest.approx(expected, abs=1e-5)
