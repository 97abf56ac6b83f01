"""X15: pairs whose token ids mean different things are refused at start."""

from pathlib import Path

import pytest

from cluster.drafters.vocabulary import check_same_tokenizer, check_same_vocabulary, load_tokens
from cluster.errors import VocabularyMismatch
from tests.checkpoints import make_checkpoint, make_tokenizer

NUM_TOKENS = 280
TOKENS = {0: "a", 1: "b", 2: "c"}


def test_equal_tokens_pass() -> None:
    """The order in which a vocabulary lists its tokens does not matter."""
    check_same_vocabulary(TOKENS, {2: "c", 0: "a", 1: "b"})


@pytest.mark.parametrize(
    ("draft_tokens", "token_id", "named"),
    [
        ({0: "a", 1: "x", 2: "y"}, 1, ["'b'", "'x'"]),
        ({0: "a", 1: "b"}, 2, ["'c'", "None"]),
        ({0: "a", 1: "b", 2: "c", 3: "d"}, 3, ["None", "'d'"]),
        ({0: "a", 2: "c", 3: "b"}, 1, ["'b'", "None"]),
    ],
)
def test_the_first_difference_is_named(
    draft_tokens: dict[int, str], token_id: int, named: list[str]
) -> None:
    """The refusal says at which id the two part, and what each has there."""
    with pytest.raises(VocabularyMismatch) as refused:
        check_same_vocabulary(TOKENS, draft_tokens)
    assert refused.value.token_id == token_id
    assert all(text in str(refused.value) for text in (str(token_id), *named))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("target"), vocab_size=NUM_TOKENS)


def test_x15a_padding_of_the_model_is_allowed(target: Path, tmp_path: Path) -> None:
    """Rows of the draft model beyond the tokenizer's own tokens are no difference."""
    draft = make_checkpoint(tmp_path, vocab_size=NUM_TOKENS + 128)
    make_tokenizer(draft, vocab_size=NUM_TOKENS)
    assert check_same_tokenizer(target, draft) == len(load_tokens(target)) == NUM_TOKENS


def test_x15b_another_tokenizer_of_equal_size_is_refused(target: Path, tmp_path: Path) -> None:
    """Equal sizes prove nothing: the ids would mean different text."""
    other = make_tokenizer(
        tmp_path,
        vocab_size=NUM_TOKENS,
        corpus=("The quick brown fox jumps over the lazy dog. " * 9,),
    )
    assert len(load_tokens(other)) == len(load_tokens(target))
    with pytest.raises(VocabularyMismatch) as refused:
        check_same_tokenizer(target, other)
    target_tokens, other_tokens = load_tokens(target), load_tokens(other)
    differing = [each for each in target_tokens if target_tokens[each] != other_tokens.get(each)]
    assert refused.value.token_id == min(differing)


def test_x15c_another_size_is_refused(target: Path, tmp_path: Path) -> None:
    """A longer vocabulary with the same beginning is refused where the shorter one ends."""
    longer = make_tokenizer(tmp_path, vocab_size=NUM_TOKENS + 10)
    with pytest.raises(VocabularyMismatch) as refused:
        check_same_tokenizer(target, longer)
    assert refused.value.token_id == NUM_TOKENS
