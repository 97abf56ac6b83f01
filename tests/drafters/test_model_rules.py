"""Drafts under both rules: shaped by everything that shapes the target's distribution."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.model import DraftModel
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, Rule, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.sampling.draw import distribution, sample
from cluster.sampling.noise import Stream, number
from cluster.sampling.ratio import NUM_SHIPPED
from tests.checkpoints import make_checkpoint

CONTEXT = 64
VOCAB = 300
PROMPT = (5, 6, 7, 8, 9, 5, 6)
PLAIN = SamplingSpec(seed=11, temperature=0.8, num_prompt_tokens=len(PROMPT))
SPECS = {
    "plain": PLAIN,
    "filters": replace(PLAIN, top_k=40, top_p=0.9, min_p=0.01),
    "repetition": replace(PLAIN, repetition_penalty=1.8),
    "presence": replace(PLAIN, presence_penalty=1.5, frequency_penalty=0.7),
    "rewards": replace(PLAIN, frequency_penalty=-2.0, temperature=0.3),
    "bias": replace(PLAIN, logit_bias=((3, 4.0), (VOCAB + 5, 9.0))),
    "allowed": replace(PLAIN, allowed_token_ids=(*range(40), VOCAB + 5)),
    "banned": replace(
        PLAIN, temperature=0.2, banned_token_ids=(7, VOCAB + 5), banned_sequences=((8, 9), (5, 6))
    ),
    "held back": replace(
        PLAIN, suppressed_token_ids=tuple(range(100)), suppressed_before=len(PROMPT) + 2
    ),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_checkpoint(tmp_path_factory.mktemp("draft"), vocab_size=VOCAB)
    return load_decoder(folder, dtype="float32")


def draft_model(decoder: Decoder, *, vocab_size: int | None = None) -> DraftModel:
    return DraftModel(decoder, num_blocks=4, block_size=CONTEXT, vocab_size=vocab_size)


def drafts_of(
    model: DraftModel, rule: Rule, specs: Sequence[SamplingSpec], text: Sequence[int], k: int = 5
) -> list[Draft]:
    """One draft per spec after the same text, all in one exchange."""
    client = ExchangeClient("e", rule=rule)
    queries = [
        DraftQuery(seq_id=place, token_ids=text, num_wanted=k, sampling=spec)
        for place, spec in enumerate(specs)
    ]
    drafts = client.digest(model.exchange(client.message(queries)))
    return [drafts[place] for place in range(len(specs))]


@torch.inference_mode()
def logits_after(decoder: Decoder, text: Sequence[int]) -> torch.Tensor:
    """The last row of a plain forward pass: `[1, vocab]`."""
    cache = KVCache.of(decoder, num_blocks=1, block_size=CONTEXT)
    hidden = decoder.forward(torch.tensor(text), [Segment((0,), 0, len(text))], cache)
    return decoder.logits(hidden[-1:])


@pytest.mark.parametrize("name", SPECS)
def test_the_targets_own_weights_draft_the_targets_own_tokens(decoder: Decoder, name: str) -> None:
    """Coupled: each draft sees the drafts before it as text, for penalties and banned words too."""
    spec, text = SPECS[name], list(PROMPT)
    [draft] = drafts_of(draft_model(decoder), Rule.COUPLED, [spec], text)
    assert len(draft.token_ids) == 5
    assert draft.distributions == ()
    for token_id in draft.token_ids:
        own = sample(logits_after(decoder, text), [spec], [len(text)], histories=[text])
        assert own == [token_id]
        text.append(token_id)


@pytest.mark.parametrize("name", SPECS)
def test_a_ratio_draft_brings_the_distribution_it_was_drawn_from(
    decoder: Decoder, name: str
) -> None:
    """Ratio: the best of the processed distribution, made to sum to 1, and the noise of drafts."""
    spec, text = SPECS[name], list(PROMPT)
    [draft] = drafts_of(draft_model(decoder), Rule.RATIO, [spec], text)
    assert len(draft.token_ids) == len(draft.distributions) == 5
    for token_id, shipped in zip(draft.token_ids, draft.distributions, strict=True):
        row = distribution(logits_after(decoder, text), [spec], [len(text)], histories=[text])[0]
        best = row.topk(NUM_SHIPPED)
        kept = best.values[best.values > 0]
        assert shipped.token_ids == tuple(best.indices[: len(kept)].tolist())
        assert shipped.probabilities == pytest.approx((kept / kept.sum()).tolist(), abs=1e-9)
        where = number(spec.seed, len(text), Stream.DRAFT)
        place = shipped.token_ids.index(token_id)
        assert (
            sum(shipped.probabilities[:place]) <= where <= sum(shipped.probabilities[: place + 1])
        )
        text.append(token_id)


def test_at_temperature_0_both_rules_draft_the_same_certain_tokens(decoder: Decoder) -> None:
    """Nothing is drawn, so there is no distribution to bring."""
    greedy = [replace(spec, temperature=0.0) for spec in SPECS.values()][:4]
    coupled = drafts_of(draft_model(decoder), Rule.COUPLED, greedy, PROMPT)
    assert drafts_of(draft_model(decoder), Rule.RATIO, greedy, PROMPT) == coupled
    assert all(draft.distributions == () for draft in coupled)


@pytest.mark.parametrize("rule", Rule)
def test_a_draft_is_the_same_in_any_company(decoder: Decoder, rule: Rule) -> None:
    """Greedy, random, penalised and filtered sequences side by side do not touch each other."""
    specs = [
        replace(PLAIN, temperature=0.0),
        SPECS["filters"],
        SPECS["repetition"],
        replace(SPECS["presence"], temperature=0.0),
    ]
    together = drafts_of(draft_model(decoder), rule, specs, PROMPT)
    for spec, draft in zip(specs, together, strict=True):
        assert drafts_of(draft_model(decoder), rule, [spec], PROMPT) == [draft]


@pytest.mark.parametrize("rule", Rule)
def test_where_nothing_may_be_drawn_the_draft_ends(decoder: Decoder, rule: Rule) -> None:
    """A spec that leaves the draft model no token gets no draft, and its neighbours theirs."""
    for temperature in (0.0, 1.0):
        beyond = replace(PLAIN, temperature=temperature, allowed_token_ids=(VOCAB + 5,))
        later = replace(
            PLAIN,
            temperature=temperature,
            allowed_token_ids=(5, 6),
            banned_sequences=((6, 6), (5, 5), (5, 6)),
        )
        nothing, one, whole = drafts_of(draft_model(decoder), rule, [beyond, later, PLAIN], PROMPT)
        assert nothing == Draft()
        assert one.token_ids == (5,)
        assert len(whole.token_ids) == 5


def test_shipped_ids_stay_in_the_targets_vocabulary(decoder: Decoder) -> None:
    """A draft of more padded rows than the target puts no probability on them."""
    hot = replace(PLAIN, temperature=50.0)
    [draft] = drafts_of(draft_model(decoder, vocab_size=100), Rule.RATIO, [hot], PROMPT, 20)
    for shipped in draft.distributions:
        assert len(shipped.token_ids) == NUM_SHIPPED
        assert max(shipped.token_ids) < 100
        assert sum(shipped.probabilities) == pytest.approx(1, abs=1e-12)


def test_a_repeated_message_gets_the_same_ratio_drafts(decoder: Decoder) -> None:
    """Drafts are a function of context, seed and position: a lost answer can be asked for again."""
    model = draft_model(decoder)
    first = drafts_of(model, Rule.RATIO, [PLAIN], PROMPT)
    assert drafts_of(model, Rule.RATIO, [PLAIN], PROMPT) == first
    assert drafts_of(draft_model(decoder), Rule.RATIO, [replace(PLAIN, seed=12)], PROMPT) != first
