"""The real model as its own draft."""

import pytest
import torch

from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.model import DraftModel
from cluster.interfaces import DraftQuery
from cluster.messages import SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.models.load import load_decoder
from cluster.models.reference import resolve
from cluster.sampling.draw import sample

pytestmark = pytest.mark.model

PROMPT = tuple(range(1000, 1040))
NUM_STEPS = 3


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(resolve("smollm2-135m-instruct"), dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_draft_is_the_token_the_target_draws(decoder: Decoder, temperature: float) -> None:
    """On the real vocabulary and weights, too, equal models draft each other's tokens exactly."""
    sampling = SamplingSpec(seed=5, temperature=temperature)
    model = DraftModel(decoder, num_blocks=1, block_size=128, max_rows=16)
    client = ExchangeClient("engine")
    text = list(PROMPT)
    drafts: list[tuple[int, ...]] = []
    while len([draft for draft in drafts if draft]) < NUM_STEPS:
        query = DraftQuery(seq_id=1, token_ids=text, num_wanted=4, sampling=sampling)
        drafts.append(client.digest(model.exchange(client.message([query])))[1].token_ids)
        text += drafts[-1][:3]
    assert [len(draft) for draft in drafts] == [0, 0, 4, 4, 4]
    cache = KVCache.of(decoder, num_blocks=1, block_size=128)
    start = 0
    for end in range(len(PROMPT), len(text)):
        hidden = decoder.forward(
            torch.tensor(text[start:end]), [Segment((0,), start, end - start)], cache
        )
        assert sample(decoder.logits(hidden[-1:]), [sampling], [end]) == [text[end]]
        start = end
