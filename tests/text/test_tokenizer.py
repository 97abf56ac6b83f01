"""Encoding and chat templates, against transformers' own."""

from pathlib import Path

import pytest

from cluster.errors import ConfigurationError, InvalidRequest
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer

CONVERSATION = [ChatMessage("user", "Hi there 👍"), ChatMessage("assistant", "Hello.")]


def test_encoding_is_that_of_transformers(smollm2: Tokenizer) -> None:
    """A prompt becomes the ids that transformers would give the model."""
    text = "Repeat the following text exactly: ünïcode, 123 <|im_end|>"
    assert list(smollm2.encode(text)) == smollm2._tokenizer(text).input_ids


def test_chat_is_that_of_transformers(smollm2: Tokenizer) -> None:
    """A conversation becomes the template's ids, ready for the model's turn."""
    expected = smollm2._tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in CONVERSATION],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert list(smollm2.chat(CONVERSATION)) == expected


def test_template_that_refuses_is_the_callers_error(byte_level: Tokenizer) -> None:
    """A conversation the template does not want is refused as `messages`, with its reason."""
    theirs = byte_level._tokenizer
    template = theirs.chat_template
    theirs.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(InvalidRequest, match=r"messages: .*roles must alternate"):
            byte_level.chat(CONVERSATION)
    finally:
        theirs.chat_template = template


def test_no_template_is_the_callers_error(byte_fallback: Tokenizer) -> None:
    """A base model has no conversations."""
    with pytest.raises(InvalidRequest, match=r"messages: .*no chat template"):
        byte_fallback.chat(CONVERSATION)


def test_tokens_are_listed_by_id(smollm2: Tokenizer) -> None:
    """Every id has its token, which is what two models' vocabularies are compared by."""
    assert smollm2.num_tokens == 49152
    assert smollm2.tokens[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(ConfigurationError, match=tmp_path.name):
        load_tokenizer(tmp_path)
