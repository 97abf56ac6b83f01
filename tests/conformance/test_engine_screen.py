"""Greedy answers without logprobs, which a screen before the head may give: tokens are the same.

Its tokens are those of speculation off with logprobs, for which the head itself is computed.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch import Tensor

from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from cluster.models.screen import LEAST_VOCABULARY, is_screened
from cluster.request import Request
from tests.checkpoints import make_checkpoint
from tests.conformance.inputs import SAMPLED, limits_of
from tests.conformance.lab import Lab
from tests.harness import GREEDY, Recorder, make_request

VOCAB = 9000
LIMITS = limits_of(vocab_size=VOCAB)
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 1}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Lab:
    """Two models whose head is the embedding, of a vocabulary that is large enough."""
    del one_thread
    folder = tmp_path_factory.mktemp("wide")
    for name, seed in (("target", 1), ("random", 2)):
        make_checkpoint(folder / name, seed=seed, tie_word_embeddings=True, **SIZES)
    decoders = {name: load_decoder(folder / name, dtype="float32") for name in ("target", "random")}
    assert VOCAB >= LEAST_VOCABULARY
    assert is_screened(decoders["target"].spec, dtype="float32", device="cpu")
    return Lab(decoders)


def requests() -> list[Request]:
    """12 greedy ones without logprobs, 4 with, and 2 that are sampled; some of a word repeated.

    They come mixed; the last one has no logprobs and the longest answer, at whose end it is alone.
    """
    rng = random.Random(4)
    asked = []
    for index in range(18):
        word = rng.choices(range(3, VOCAB), k=rng.randint(1, 12))
        request = make_request(
            word * rng.choice((1, 3)),
            request_id=str(index),
            sampling=SAMPLED if index >= 16 else GREEDY,
            max_tokens=8 if index != 5 else 60,
            ignore_eos=True,
        )
        asked.append(replace(request, logprobs=12 <= index < 16))
    return [asked[5 * index % 18] for index in range(2, 20)]


@contextmanager
def screened(decoder: Decoder) -> Iterator[list[int]]:
    """How many rows each step has that a screen answers."""
    num_rows: list[int] = []
    largest = decoder.largest

    def counted(rows: Tensor) -> list[int] | None:
        found = largest(rows)
        if found is not None:
            num_rows.append(len(rows))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "largest", counted)
        yield num_rows


def tokens(recorders: Sequence[Recorder]) -> dict[str, tuple[int, ...]]:
    """By request."""
    return {each.request.request_id: each.answer().token_ids for each in recorders}


@pytest.fixture(scope="module")
def plain(lab: Lab) -> dict[str, tuple[int, ...]]:
    """The tokens of speculation off, with logprobs for all: the screen has no part in them."""
    scored = [replace(request, logprobs=True) for request in requests()]
    with screened(lab.decoders["target"]) as num_rows:
        recorders = asyncio.run(lab.recorders(scored, "off", k=0, limits=LIMITS))
    assert not num_rows
    return tokens(recorders)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("drafter", ["same", "ngram", "random"])
async def test_tokens_are_those_of_the_head(
    lab: Lab, plain: dict[str, tuple[int, ...]], drafter: str, k: int, concurrency: int
) -> None:
    """Alone or beside others, whatever is drafted: the screen answers for drafts, too."""
    with screened(lab.decoders["target"]) as num_rows:
        recorders = await lab.recorders(
            requests(), drafter, k=k, limits=LIMITS, concurrency=concurrency
        )
    assert tokens(recorders) == plain
    assert num_rows
    assert max(num_rows) > 1 or drafter == "ngram"  # which may have none when it counts
