"""X05 on the real model: its next token through both rules, against its own softmax."""

import numpy as np
import pytest
import torch

from cluster.messages import Rule, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.models.reference import resolve
from cluster.sampling.draw import distribution, sample
from cluster.sampling.ratio import draw_drafts, verify_ratio
from cluster.sampling.verify import verify
from tests.conformance.chains import chi_square

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

NUM_DRAWS = 20_000
AT_ONCE = 250
TOP_P = 0.9
CONTEXTS = {  # of which top-p keeps some dozens of tokens at that temperature
    0.7: (504, 1450, 3645, 282, 260, 713, 314),  # The best season of the year is
    1.0: (788, 260, 5738, 1041, 6572, 260, 5700, 284, 3680),  # In the morning she opened the ...
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(resolve("smollm2-135m-instruct"), dtype="float32")


@torch.inference_mode()
def logits_after(decoder: Decoder, context: tuple[int, ...]) -> torch.Tensor:
    """The row that follows a context: `[1, vocab]`."""
    cache = KVCache.of(decoder, num_blocks=1, block_size=64)
    segment = Segment((0,), 0, len(context))
    return decoder.logits(decoder.forward(torch.tensor(context), [segment], cache)[-1:])


def by_softmax(logits: torch.Tensor, temperature: float) -> np.ndarray:
    """The softmax, and of it the fewest most probable tokens that reach TOP_P, in NumPy alone."""
    scaled = logits[0].double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    ranked = np.argsort(-probs, kind="stable")
    kept = ranked[: int(np.searchsorted(probs[ranked].cumsum(), TOP_P)) + 1]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


def specs(temperature: float, first_seed: int) -> list[SamplingSpec]:
    seeds = range(first_seed, first_seed + AT_ONCE)
    return [SamplingSpec(seed=seed, temperature=temperature, top_p=TOP_P) for seed in seeds]


def coupled(logits: torch.Tensor, temperature: float) -> list[int]:
    """What is emitted for each seed when the likeliest token is the draft."""
    draft, rows = int(logits.argmax()), logits.expand(AT_ONCE, -1)
    emitted: list[int] = []
    for first in range(0, NUM_DRAWS, AT_ONCE):
        for token in sample(rows, specs(temperature, first), [9] * AT_ONCE):
            result = verify([draft], [token, 0])
            emitted.append(draft if result.num_accepted else result.next_token_id)
    return emitted


def ratio(logits: torch.Tensor, temperature: float) -> list[int]:
    """What is emitted for each seed when drafts come from a hotter distribution, cut off."""
    drafts = hotter(logits, temperature)
    target = distribution(logits, specs(temperature, 0)[:1], [9]).expand(2, -1)
    emitted: list[int] = []
    for seed, (token, shipped) in enumerate(drafts):
        emitted += verify_ratio(target, [token], [shipped], seed=seed, positions=[9, 10])[:1]
    return emitted


def hotter(logits: torch.Tensor, temperature: float, num_draws: int = NUM_DRAWS) -> list:
    """A draft for each seed, and the distribution it was drawn from."""
    probs = distribution(logits, specs(1.2 * temperature, 0)[:1], [9]).expand(AT_ONCE, -1)
    drafts = []
    for first in range(0, num_draws, AT_ONCE):
        drawn = draw_drafts(probs, range(first, first + AT_ONCE), [9] * AT_ONCE)
        drafts += [(draft.token_id, draft.distribution) for draft in drawn if draft is not None]
    return drafts


@pytest.mark.parametrize("temperature", CONTEXTS)
@pytest.mark.parametrize("rule", Rule)
def test_x05_the_real_models_next_token_is_distributed_as_its_softmax(
    decoder: Decoder, rule: Rule, temperature: float
) -> None:
    """Over the whole vocabulary, at top-p 0.9, what is emitted follows the target."""
    logits = logits_after(decoder, CONTEXTS[temperature])
    probs = by_softmax(logits, temperature)
    assert 20 < int((probs > 0).sum()) < 60
    tokens = {Rule.COUPLED: coupled, Rule.RATIO: ratio}[rule](logits, temperature)
    assert len(tokens) == NUM_DRAWS
    assert chi_square(np.bincount(tokens, minlength=len(probs)), probs) > 0.001


def test_x05_drafts_that_are_not_verified_are_caught_on_the_real_model(decoder: Decoder) -> None:
    """The same check fails on the drafts themselves, near as they are."""
    logits = logits_after(decoder, CONTEXTS[1.0])
    drafts = [token for token, _ in hotter(logits, 1.0, 5000)]
    probs = by_softmax(logits, 1.0)
    assert chi_square(np.bincount(drafts, minlength=len(probs)), probs) < 1e-9
