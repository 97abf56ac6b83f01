"""Streamed text against decoding everything at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import UnsupportedFeature
from cluster.text.decoding import parse_decoding
from cluster.text.detokenizer import Detokenizer
from cluster.text.tokenizer import Tokenizer

EXAMPLES = (
    "Plain words, with  two spaces and\na line.",
    "👩‍👩‍👧‍👦 a family, 🇪🇺 a flag, 👍🏽 a thumb",
    "你好、世界。こんにちは世界",
    "e\u0301 and a\u0308\u0323, combining marks",
    " leading space",
    "a � that was really written",
)
HALF_OF_AN_EMOJI = "👍".encode()[:2]


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.vocabulary)
    return [detokenizer.push(token_id) for token_id in token_ids]


def at_once(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """What transformers makes of all ids together."""
    text: str = tokenizer._tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("text", EXAMPLES)
def test_texts_come_back_whole(byte_level: Tokenizer, text: str) -> None:
    """A text that was tokenised comes back as it was, and never a broken character on the way."""
    streamed = pieces(byte_level, byte_level.encode(text))
    assert "".join(streamed) == text
    if "�" not in text:
        assert not any("�" in piece for piece in streamed)


@pytest.mark.parametrize("text", EXAMPLES)
def test_texts_come_back_whole_in_the_real_vocabulary(smollm2: Tokenizer, text: str) -> None:
    """The same with the built-in model's tokens."""
    token_ids = smollm2.encode(text)
    assert "".join(pieces(smollm2, token_ids)) == text == at_once(smollm2, token_ids)


@settings(deadline=None)
@given(st.data())
def test_byte_level_equals_decoding_at_once(byte_level: Tokenizer, data: st.DataObject) -> None:
    """Any ids whatever, valid UTF-8 or not: the joined pieces are the text of all ids.

    But for the one U+FFFD that decoding at once puts in place of an incomplete end.
    """
    token_ids = data.draw(st.lists(st.integers(0, byte_level.num_tokens + 3), max_size=40))
    detokenizer = Detokenizer(byte_level.vocabulary)
    text = "".join(map(detokenizer.push, token_ids))
    pending = bool(detokenizer._decoder.getstate()[0])
    known = [token_id for token_id in token_ids if token_id < byte_level.num_tokens]
    assert text + "\ufffd" * pending == at_once(byte_level, known)


@settings(deadline=None)
@given(st.data())
def test_byte_fallback_equals_decoding_at_once(
    byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    """Words, spaces, specials and byte tokens of whole characters in any order."""
    words = st.sampled_from(
        [[i] for i, token in enumerate(byte_fallback.tokens) if token and "0x" not in token]
    )
    spelled = st.sampled_from("aé你👍\u0301").map(
        lambda character: [
            byte_fallback.tokens.index(f"<0x{byte:02X}>") for byte in character.encode()
        ]
    )
    runs = data.draw(st.lists(st.one_of(words, spelled), max_size=30))
    token_ids = [token_id for run in runs for token_id in run]
    assert "".join(pieces(byte_fallback, token_ids)) == at_once(byte_fallback, token_ids)


@settings(deadline=None)
@given(st.data())
def test_metaspace_equals_decoding_at_once(metaspace: Tokenizer, data: st.DataObject) -> None:
    """Any words in any order, the first without its marks."""
    token_ids = data.draw(st.lists(st.integers(0, metaspace.num_tokens - 1), max_size=30))
    assert "".join(pieces(metaspace, token_ids)) == at_once(metaspace, token_ids)


def test_character_belongs_to_the_token_that_completes_it(byte_level: Tokenizer) -> None:
    """An emoji of four one-byte tokens appears with the fourth, whole."""
    token_ids = byte_level.encode("👍")
    assert len(token_ids) == 4
    assert pieces(byte_level, token_ids) == ["", "", "", "👍"]


def test_incomplete_end_is_no_text(byte_level: Tokenizer) -> None:
    """Half a character at the end does not come out, as itself or as anything else."""
    token_ids = byte_level.encode("ok👍")[:-1]
    assert "".join(pieces(byte_level, token_ids)) == "ok" == byte_level.decode(token_ids)


def test_bytes_that_can_be_no_character_are_marked(byte_level: Tokenizer) -> None:
    """A character that is broken off by another leaves one U+FFFD, as decoding at once does."""
    token_ids = [*byte_level.encode("👍")[:2], *byte_level.encode("ok")]
    assert byte_level.decode(token_ids) == "\ufffdok" == at_once(byte_level, token_ids)
    assert HALF_OF_AN_EMOJI.decode(errors="replace") == "\ufffd"


def test_whole_characters_survive_broken_neighbours(byte_fallback: Tokenizer) -> None:
    """With byte tokens, a whole character beside a broken one stays."""
    spelled = [
        byte_fallback.tokens.index(f"<0x{byte:02X}>") for byte in "你".encode() + HALF_OF_AN_EMOJI
    ]
    assert byte_fallback.decode([*spelled, byte_fallback.tokens.index("a")]) == "你\ufffda"


def test_special_tokens_give_no_text(byte_level: Tokenizer) -> None:
    """EOS and its kind have ids but no text, wherever they are."""
    inside = [1, *byte_level.encode("hi"), 0, *byte_level.encode(" you"), 2]
    assert byte_level.decode(inside) == "hi you"


def test_unknown_decoder_is_refused_by_name() -> None:
    """A tokenizer whose text cannot be streamed exactly is refused at start."""
    with pytest.raises(UnsupportedFeature, match="WordPiece"):
        parse_decoding({"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(UnsupportedFeature, match="null"):
        parse_decoding(None)
