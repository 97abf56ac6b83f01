"""Encoding and chat templates, against transformers' own."""

from pathlib import Path

import pytest

from cluster.errors import ConfigurationError, InvalidRequest
from cluster.models.reference import resolve
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer, load_vocabulary

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


@pytest.mark.parametrize("word", ["hello", "foobar", "it's", "123", "éà", "👍"])
def test_a_word_is_what_it_is_inside_a_text(smollm2: Tokenizer, word: str) -> None:
    """Both forms are the very tokens that end a text with the word, after a mark or a space."""
    bare, spaced = smollm2.word(word)
    assert smollm2.encode(f"say ({word}")[-len(bare) :] == bare
    assert smollm2.encode(f"say {word}")[-len(spaced) :] == spaced
    assert smollm2.word(f" {word}") == (bare, spaced)


@pytest.mark.parametrize(
    ("word", "tokens"), [("a", [["a"], ["<0x20>", "a"]]), (" ", [["<0x20>"]]), ("", [["<0x20>"]])]
)
def test_forms_of_a_word(byte_fallback: Tokenizer, word: str, tokens: list[list[str]]) -> None:
    """A form without tokens is left out, and no form has the mark of a text's beginning."""
    forms = byte_fallback.word(word)
    assert [[byte_fallback.tokens[token_id] for token_id in form] for form in forms] == tokens


def test_tokens_are_listed_by_id(smollm2: Tokenizer) -> None:
    """Every id has its token, which is what two models' vocabularies are compared by."""
    assert smollm2.num_tokens == 49152
    assert smollm2.tokens[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(ConfigurationError, match=tmp_path.name):
        load_tokenizer(tmp_path)


def test_the_vocabulary_alone_is_the_tokenizers(tmp_path: Path, smollm2: Tokenizer) -> None:
    """Read without transformers it has the same tokens, special ids and bytes."""
    own = load_vocabulary(resolve("smollm2-135m-instruct"))
    assert own.tokens == smollm2.vocabulary.tokens
    assert own.special_token_ids == smollm2.vocabulary.special_token_ids
    assert own.decoding.piece("Ġthe") == smollm2.vocabulary.decoding.piece("Ġthe") == b" the"
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        load_vocabulary(tmp_path)
