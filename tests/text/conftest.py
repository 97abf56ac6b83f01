"""Tokenizers of the three kinds, made without a network."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from cluster.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import make_tokenizer

PIECES = ("▁", "▁▁", "▁a", "▁a▁", "a", "b", "é", "你", "▁you", "#", "##", "▁#")


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2's kind, from a folder: tokens are bytes and merges of them."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("byte_level"), vocab_size=320))


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """Llama 2's kind: marked words, byte tokens, and one space stripped at the start."""
    words = ("<s>", *PIECES, *(f"<0x{byte:02X}>" for byte in range(256)))
    backend = Backend(
        models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return wrap(backend)


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """T5's kind: marked words, and no mark in the first."""
    backend = Backend(
        models.WordLevel({word: place for place, word in enumerate(("<s>", *PIECES))}, "<s>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return wrap(backend)


def wrap(backend: Backend) -> Tokenizer:
    """Ours around theirs, with an added token that is not special and has a space in it."""
    backend.add_tokens([AddedToken("<do it>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The built-in model's own tokenizer."""
    from cluster.models.reference import resolve  # noqa: PLC0415 - only where it is asked for

    return load_tokenizer(resolve("smollm2-135m-instruct"))
