"""X05, ratio rule: what is emitted is distributed as the target alone, and a fault would show."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.messages import DraftDistribution
from cluster.sampling import ratio
from cluster.sampling.noise import Stream, number
from cluster.sampling.ratio import DrawnDraft, draw_drafts, verify_ratio
from tests.conformance.chains import (
    FEW_DRAWS,
    FIRST_POSITION,
    NUM_DRAWS,
    VOCAB,
    Chain,
    draft_chain,
    p_values,
    specs_of,
    target_chain,
)

pytestmark = [pytest.mark.statistics, pytest.mark.usefixtures("one_thread")]

SOME_DRAWS = 20_000
Ship = Callable[[DrawnDraft], DraftDistribution | None]


def as_drawn(draft: DrawnDraft) -> DraftDistribution | None:
    return draft.distribution


def emitted(
    draft: Chain,
    name: str,
    *,
    k: int,
    num_draws: int = NUM_DRAWS,
    num_shipped: int = VOCAB,
    ship: Ship | None = as_drawn,
) -> np.ndarray:
    """The first two tokens of many seeded requests after token 0: `[num_draws, 2]`.

    A step drafts k tokens and verifies them, as an engine would; a request to which it brings one
    token takes a second step, without drafts. `ship` says what a draft brings as the distribution
    it was drawn from: without it all are certain, and where it gives None the draft ends before.
    """
    target, seeds = target_chain().probs(name), range(num_draws)
    positions = range(FIRST_POSITION, FIRST_POSITION + k + 1)
    tokens: list[list[int]] = []
    for seed, chain in enumerate(
        chains(draft.probs(name), [0] * num_draws, seeds, positions[:-1], num_shipped)
    ):
        kept = chain if ship is None else list(believed(chain, ship))
        token_ids = [each.token_id for each in kept]
        distributions = [] if ship is None else [each.distribution for each in kept]
        rows = target[[0, *token_ids]]
        at = positions[: len(kept) + 1]
        tokens.append(verify_ratio(rows, token_ids, distributions, seed=seed, positions=at))
    short = [seed for seed in seeds if len(tokens[seed]) == 1]
    specs = [specs_of(name)[seed] for seed in short]
    lasts = np.array([tokens[seed][0] for seed in short], dtype=np.int64)
    drawn = target_chain().draw(lasts, specs, positions[1]).tolist() if short else []
    for seed, token_id in zip(short, drawn, strict=True):
        tokens[seed].append(token_id)
    return np.array([each[:2] for each in tokens])


def chains(
    probs: Tensor,
    lasts: Sequence[int],
    seeds: Sequence[int],
    positions: Sequence[int],
    num_shipped: int,
) -> list[list[DrawnDraft]]:
    """Each request's drafts, drawn one position after the other."""
    drawn: list[list[DrawnDraft]] = [[] for _ in seeds]
    for position in positions:
        new = draw_drafts(probs[lasts], seeds, [position] * len(seeds), num_shipped=num_shipped)
        lasts = [draft.token_id for draft in new]
        for chain, draft in zip(drawn, new, strict=True):
            chain.append(draft)
    return drawn


def believed(chain: Sequence[DrawnDraft], ship: Ship) -> Iterator[DrawnDraft]:
    """The drafts with what is shipped, up to the first that brings nothing."""
    for draft in chain:
        distribution = ship(draft)
        if distribution is None:
            return
        yield DrawnDraft(draft.token_id, distribution)


@pytest.mark.parametrize("name", ["plain", "temperature", "top_k", "top_p", "all"])
def test_x05_emitted_tokens_are_distributed_as_the_target_alone(name: str) -> None:
    """Under every filter, one token and two in a row follow the target, whatever drafts."""
    assert min(p_values(emitted(draft_chain("other"), name, k=1), name)) > 0.001


def test_x05_certain_drafts_leave_the_target() -> None:
    """One-hot: an n-gram's token, whatever it is, is kept as often as the target would draw it."""
    assert min(p_values(emitted(draft_chain("one_hot"), "plain", k=2, ship=None), "plain")) > 0.001


@pytest.mark.parametrize(
    ("kind", "k", "num_shipped"), [("same", 2, VOCAB), ("near", 3, VOCAB), ("other", 2, 3)]
)
def test_x05_the_number_of_drafts_does_not_matter(kind: str, k: int, num_shipped: int) -> None:
    """Two drafts a step or three, the target's own or a cut-off distribution: all the same."""
    draft = draft_chain(kind)
    tokens = emitted(draft, "all", k=k, num_draws=SOME_DRAWS, num_shipped=num_shipped)
    assert min(p_values(tokens, "all")) > 0.001


def test_x05_more_drafts_are_kept_than_by_the_coupled_rule() -> None:
    """The share kept is the mass both distributions have in common: no rule can keep more."""
    target, drafts = target_chain().probs("plain"), draft_chain("near").probs("plain")
    common = float(torch.minimum(target[0], drafts[0]).sum())
    drawn = draw_drafts(drafts[[0] * SOME_DRAWS], range(SOME_DRAWS), [9] * SOME_DRAWS)
    kept = sum(
        len(
            verify_ratio(
                target[[0, draft.token_id]],
                [draft.token_id],
                [draft.distribution],
                seed=seed,
                positions=[9, 10],
            )
        )
        - 1
        for seed, draft in enumerate(drawn)
    )
    assert abs(kept / SOME_DRAWS - common) < 4 * (common * (1 - common) / SOME_DRAWS) ** 0.5
    assert kept / SOME_DRAWS > common / (2 - common)  # what a Gumbel coupling guarantees


def hotter(draft: DrawnDraft) -> DraftDistribution:
    """A mutant: what is shipped is another temperature's distribution."""
    weights = np.sqrt(draft.distribution.probabilities)
    return DraftDistribution(
        draft.distribution.token_ids, tuple((weights / weights.sum()).tolist())
    )


def unfiltered(draft: DrawnDraft) -> DraftDistribution:
    """A mutant: what is shipped is not the renormalised distribution but the one before."""
    probabilities = tuple(0.7 * each for each in draft.distribution.probabilities)
    return DraftDistribution(draft.distribution.token_ids, probabilities)


def if_likely(draft: DrawnDraft) -> DraftDistribution | None:
    """A mutant: drafts are left out when they are improbable themselves."""
    place = draft.distribution.token_ids.index(draft.token_id)
    return draft.distribution if draft.distribution.probabilities[place] > 0.2 else None


@pytest.mark.parametrize("ship", [hotter, unfiltered, if_likely])
def test_x05_a_distribution_that_was_not_drawn_from_is_caught(ship: Ship) -> None:
    """The check fails when drafts do not come from what is shipped with them."""
    tokens = emitted(draft_chain("other"), "plain", k=1, num_draws=FEW_DRAWS, ship=ship)
    assert min(p_values(tokens, "plain")) < 1e-9


@pytest.mark.parametrize(
    ("stream", "shared", "kind"),
    [
        (Stream.ACCEPTANCE, Stream.DRAFT, "other"),
        (Stream.RESIDUAL, Stream.DRAFT, "favourite"),
        (Stream.RESIDUAL, Stream.ACCEPTANCE, "other"),
    ],
)
def test_x05_shared_noise_is_caught(
    stream: Stream, shared: Stream, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails when keeping, replacing or drafting use each other's numbers."""
    streams = {stream: shared}
    monkeypatch.setattr(ratio, "number", lambda seed, at, of: number(seed, at, streams.get(of, of)))
    tokens = emitted(draft_chain(kind), "plain", k=1, num_draws=SOME_DRAWS)
    assert min(p_values(tokens, "plain")) < 1e-9


def test_x05_a_residual_of_the_target_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails when a rejected draft is replaced from the target's own distribution."""
    monkeypatch.setattr(ratio, "residual_weights", lambda target_probs, *_: target_probs)
    tokens = emitted(draft_chain("other"), "plain", k=1, num_draws=FEW_DRAWS)
    assert min(p_values(tokens, "plain")) < 1e-9


def test_x05_drafts_that_are_never_looked_at_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails when every draft is kept."""
    monkeypatch.setattr(ratio, "keep_probability", lambda *_: 1.0)
    tokens = emitted(draft_chain("other"), "plain", k=1, num_draws=FEW_DRAWS)
    assert min(p_values(tokens, "plain")) < 1e-9


def test_x05_noise_that_ignores_the_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint check fails when two positions share noise, which single tokens cannot show."""
    monkeypatch.setattr(ratio, "number", lambda seed, _, of: number(seed, 0, of))
    tokens = emitted(draft_chain("near"), "plain", k=2, num_draws=FEW_DRAWS)
    first, joint = p_values(tokens, "plain")
    assert first > 0.001
    assert joint < 1e-9
