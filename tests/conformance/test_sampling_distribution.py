"""X05, coupled rule: what is emitted is distributed as the target alone, and a fault would show."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from cluster.sampling.verify import VerifyResult, verify
from tests.conformance.chains import (
    FEW_DRAWS,
    FILTERS,
    FIRST_POSITION,
    NUM_DRAWS,
    Chain,
    draft_chain,
    p_values,
    specs_of,
    target_chain,
)

pytestmark = [pytest.mark.statistics, pytest.mark.usefixtures("one_thread")]

Verify = Callable[[Sequence[int], Sequence[int]], VerifyResult]


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
