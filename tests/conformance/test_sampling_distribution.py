"""X05: what speculation emits is distributed as the target alone, and a fault would show."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from cluster.messages import SamplingSpec
from cluster.sampling.draw import sample
from cluster.sampling.verify import VerifyResult, verify

VOCAB = 8
NUM_DRAWS = 50_000
FEW_DRAWS = 5_000  # where equality or a gross fault is looked for, not a distribution
FIRST_POSITION = 11
FILTERS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}

Verify = Callable[[Sequence[int], Sequence[int]], VerifyResult]


@dataclass(frozen=True)
class Chain:
    """A model whose logits depend on the last token only: `[VOCAB, VOCAB]`."""

    logits: torch.Tensor

    def draw(self, tokens: np.ndarray, specs: Sequence[SamplingSpec], position: int) -> np.ndarray:
        """One token after each of `tokens`, at that absolute position."""
        positions = [position] * len(tokens)
        rows = self.logits[torch.from_numpy(tokens)]
        return np.array(sample(rows, specs, positions), dtype=np.int64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only wait for each other on tensors this narrow."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def specs_of(name: str) -> tuple[SamplingSpec, ...]:
    return tuple(SamplingSpec(seed=seed, **FILTERS[name]) for seed in range(NUM_DRAWS))


def target_chain() -> Chain:
    generator = torch.Generator().manual_seed(5)
    return Chain(1.5 * torch.randn(VOCAB, VOCAB, generator=generator))


def draft_chain(kind: str) -> Chain:
    generator = torch.Generator().manual_seed(6)
    other = 1.5 * torch.randn(VOCAB, VOCAB, generator=generator)
    one_hot = torch.full((VOCAB, VOCAB), -torch.inf)
    one_hot[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 0.0
    return {
        "same": target_chain(),
        "other": Chain(other),
        "near": Chain(target_chain().logits + 0.3 * other),
        "one_hot": Chain(one_hot),
    }[kind]


def emitted(
    draft: Chain,
    name: str,
    *,
    k: int,
    num_draws: int = NUM_DRAWS,
    rule: Verify = verify,
    noise_position: Callable[[int], int] = lambda position: position,
) -> np.ndarray:
    """The first two tokens of many seeded requests after token 0: `[num_draws, 2]`.

    Each step drafts k tokens, draws the target's k + 1 own and verifies, as an engine would;
    a request whose first step emits one token takes a second step.
    """
    target = target_chain()
    requests = [[0] for _ in range(num_draws)]
    for length in (1, 2):
        waiting = [request for request in requests if len(request) == length]
        specs = [
            spec
            for spec, request in zip(specs_of(name), requests, strict=False)
            if len(request) == length
        ]
        rows = [np.array([request[-1] for request in waiting], dtype=np.int64)]
        own = []
        for position in range(FIRST_POSITION + length, FIRST_POSITION + length + k + 1):
            own.append(target.draw(rows[-1], specs, noise_position(position)))
            rows.append(draft.draw(rows[-1], specs, noise_position(position)))
        drafts, targets = np.stack(rows[1:-1], axis=1), np.stack(own, axis=1)
        for request, drafted, drawn in zip(waiting, drafts.tolist(), targets.tolist(), strict=True):
            result = rule(drafted, drawn)
            request += [*drafted[: result.num_accepted], result.next_token_id]
    return np.array([request[1:3] for request in requests])


def processed(logits: Iterable[float], spec: dict[str, float]) -> np.ndarray:
    """The distribution that a row is to be drawn from, written down anew in plain Python."""
    weights = np.exp(np.array(list(logits), dtype=np.float64) / spec["temperature"])
    probs = weights / weights.sum()
    ranked = sorted(range(VOCAB), key=lambda token: (-probs[token], token))
    ranked = ranked[: int(spec.get("top_k", 0)) or VOCAB]
    total, mass, kept = sum(probs[ranked]), 0.0, []
    for token in ranked:
        if mass < spec.get("top_p", 1.0) * total:
            kept.append(token)
        mass += probs[token]
    kept = [token for token in kept if probs[token] >= spec.get("min_p", 0.0) * probs[ranked[0]]]
    result = np.zeros(VOCAB)
    result[kept] = probs[kept] / sum(probs[kept])
    return result


def p_values(tokens: np.ndarray, name: str) -> tuple[float, float]:
    """Chi-square of the first token, and of both jointly, against the target alone."""
    by_token = np.array([processed(row.tolist(), FILTERS[name]) for row in target_chain().logits])
    first = by_token[0]
    joint = (first[:, None] * by_token).ravel()
    counts = np.bincount(tokens[:, 0], minlength=VOCAB)
    joint_counts = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
    return chi_square(counts, first), chi_square(joint_counts, joint)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """The p-value; cells expected under five times are one cell, an impossible token is p = 0."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(counts[~rare], counts[rare].sum())
    possible = expected > 0
    return float(stats.chisquare(observed[possible], expected[possible]).pvalue)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "other") for name in FILTERS), ("plain", "one_hot")],
)
def test_x05_emitted_tokens_are_distributed_as_the_target_alone(name: str, kind: str) -> None:
    """Whatever drafts, and under every filter, one token and two in a row follow the target."""
    tokens = emitted(draft_chain(kind), name, k=1)
    assert min(p_values(tokens, name)) > 0.001


@pytest.mark.parametrize(("kind", "k"), [("same", 1), ("other", 2), ("near", 3)])
def test_x05_the_number_of_drafts_does_not_matter(kind: str, k: int) -> None:
    """One draft a step or three, always right or mostly, the distribution is the target's."""
    tokens = emitted(draft_chain(kind), "plain", k=k)
    assert min(p_values(tokens, "plain")) > 0.001


@pytest.mark.parametrize("name", FILTERS)
def test_x05_tokens_do_not_depend_on_the_drafter(name: str) -> None:
    """Coupled verification gives the very same tokens per seed, whoever drafts and how many."""
    runs = [
        emitted(draft_chain(kind), name, k=k, num_draws=FEW_DRAWS)
        for kind, k in (("same", 1), ("other", 2), ("one_hot", 3))
    ]
    assert (runs[0] == runs[1]).all()
    assert (runs[0] == runs[2]).all()


def test_x05_a_near_drafter_is_mostly_right() -> None:
    """Shared noise couples target and drafter: close distributions mostly draw equal tokens."""
    target, draft = target_chain(), draft_chain("near")
    token = np.zeros(NUM_DRAWS, dtype=np.int64)
    own = target.draw(token, specs_of("plain"), FIRST_POSITION)
    matches = float((own == draft.draw(token, specs_of("plain"), FIRST_POSITION)).mean())
    target_probs, draft_probs = (chain.logits[0].softmax(-1) for chain in (target, draft))
    overlap = float(torch.minimum(target_probs, draft_probs).sum())
    assert matches > overlap / (2 - overlap) - 0.01  # what a Gumbel coupling guarantees
    assert matches > float((target_probs * draft_probs).sum()) + 0.2  # what drawing apart gives


def keep_if_likely(drafted: Sequence[int], drawn: Sequence[int]) -> VerifyResult:
    """The mutant rule: a first draft passes when it is among the target's two likeliest."""
    if drafted[0] in target_chain().logits[0].topk(2).indices:
        return VerifyResult(1, drawn[1])
    return verify(drafted, drawn)


def keep_always(drafted: Sequence[int], drawn: Sequence[int]) -> VerifyResult:
    """The mutant rule: drafts are never looked at."""
    return VerifyResult(len(drafted), drawn[-1])


@pytest.mark.parametrize("mutant", [keep_if_likely, keep_always])
def test_x05_a_rule_that_trusts_the_drafter_is_caught(mutant: Verify) -> None:
    """The check fails when any draft is emitted that the target did not draw."""
    tokens = emitted(draft_chain("other"), "plain", k=1, num_draws=FEW_DRAWS, rule=mutant)
    assert min(p_values(tokens, "plain")) < 1e-9


@pytest.mark.parametrize("mutant", [lambda _: 0, lambda position: position // 2 * 2])
def test_x05_noise_that_ignores_the_position_is_caught(mutant: Callable[[int], int]) -> None:
    """The joint check fails when two positions share noise, which single tokens cannot show."""
    tokens = emitted(draft_chain("same"), "plain", k=1, num_draws=FEW_DRAWS, noise_position=mutant)
    first, joint = p_values(tokens, "plain")
    assert first > 0.001
    assert joint < 1e-9
