"""The real model: its words are those of transformers, its bits its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from cluster.models.reference import load_generation_defaults, resolve
from tests.models.runs import in_chunks, in_company, make_cache, prefill

pytestmark = pytest.mark.model

PROMPTS = (
    "Write a haiku about memory bandwidth.",
    "Name the planets of the solar system, nearest to the sun first.",
)
NUM_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder() -> Path:
    """The built-in model, converted at most once."""
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module", params=["float32", "int8"])
def decoder(request: pytest.FixtureRequest, folder: Path) -> Iterator[Decoder]:
    """The real decoder in both exact dtypes, on two threads as it is served."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_decoder(folder, dtype=request.param)
    torch.set_num_threads(before)


def _chat(folder: Path, prompt: str) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: torch.Tensor = encoded["input_ids"][0]
    return ids


def test_the_end_of_a_turn_is_known(folder: Path) -> None:
    """The conversion keeps the chat template and the EOS that ends a turn."""
    assert load_generation_defaults(folder).eos_token_ids == {2}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(2) == tokenizer.eos_token == "<|im_end|>"


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    """The same float32 weights choose the same words, and give the same logits within 1e-3."""
    decoder = load_decoder(folder, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        prompt_ids = _chat(folder, prompt)
        generated = model.generate(
            prompt_ids[None],
            attention_mask=torch.ones_like(prompt_ids[None]),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
        )[0]
        logits = prefill(decoder, generated)
        chosen = logits[len(prompt_ids) - 1 : -1].argmax(dim=-1)
        assert chosen.tolist() == generated[len(prompt_ids) :].tolist()
        expected = model(generated[None]).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_no_bit_depends_on_the_schedule(decoder: Decoder, folder: Path) -> None:
    """A context of 600 at once, in chunks and token by token has the same logits, bit for bit."""
    text = _chat(folder, " ".join(PROMPTS * 30))[:600]
    assert len(text) == 600
    whole = prefill(decoder, text)
    for sizes in ([180, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32], [500, 1, 1, 1, 1, 1, 1, 1, 1]):
        assert torch.equal(in_chunks(decoder, text, sizes, make_cache(decoder)), whole)


def test_no_bit_depends_on_company(decoder: Decoder, folder: Path) -> None:
    """Four sequences decoded together, with rejected drafts, keep the bits each has alone."""
    sequences = [_chat(folder, prompt * repeats) for prompt in PROMPTS for repeats in (1, 4)]
    cache = make_cache(decoder, num_blocks=40, block_size=64)
    together = in_company(decoder, sequences, cache, seed=5, max_rows=32)
    for computed, token_ids in zip(together, sequences, strict=True):
        assert torch.equal(computed, prefill(decoder, token_ids))
