"""The bytes every token of a vocabulary adds to a text."""

from collections.abc import Set as AbstractSet

from cluster.text.detokenizer import Vocabulary

NEVER_IN_TEXT = b"\xff"  # no UTF-8 has it, and llguidance marks tokens that are not text with it


def pieces(
    vocabulary: Vocabulary, vocab_size: int, *, left_out: AbstractSet[int] = frozenset()
) -> list[bytes]:
    """Each token's bytes by its id, `vocab_size` of them; empty where it can be in no text.

    That is a special token, one of `left_out`, an id without a token, and a byte that no text has.
    A tokenizer that drops a space at the beginning of a text is taken as if it did not.
    """
    return [
        b"" if token_id in left_out else _piece(vocabulary, token_id)
        for token_id in range(vocab_size)
    ]


def _piece(vocabulary: Vocabulary, token_id: int) -> bytes:
    token = vocabulary.token(token_id)
    piece = b"" if token is None else vocabulary.decoding.piece(token)
    return b"" if NEVER_IN_TEXT in piece else piece
