"""Whether a draft's token ids mean what the target's mean: asked once, at start."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from cluster.errors import VocabularyMismatch


def check_same_vocabulary(
    target_tokens: Mapping[int, str], draft_tokens: Mapping[int, str]
) -> None:
    """Pass if every id names the same token in both, padding rows of the models aside.

    The mappings hold the tokenizers' real tokens, added ones included; a model may have more
    rows than that, which no tokenizer ever yields. Raises VocabularyMismatch naming the first id
    that differs.
    """
    for token_id in sorted(target_tokens.keys() | draft_tokens.keys()):
        target_token = target_tokens.get(token_id)
        draft_token = draft_tokens.get(token_id)
        if target_token != draft_token:
            raise VocabularyMismatch(
                token_id=token_id, target_token=target_token, draft_token=draft_token
            )


def check_same_tokenizer(target: Path, draft: Path) -> int:
    """The same over two checkpoint folders; returns the number of ids both have, from 0 on.

    That number is what a draft model's `vocab_size` should be limited to. Raises
    VocabularyMismatch, or ConfigurationError for a folder without a tokenizer.
    """
    target_tokens = load_tokens(target)
    check_same_vocabulary(target_tokens, load_tokens(draft))
    return max(target_tokens) + 1


def load_tokens(folder: Path) -> dict[int, str]:
    """A checkpoint's real tokens by id."""
    # transformers brings torch with it, which whoever only compares mappings has no use for.
    from transformers import AutoTokenizer  # noqa: PLC0415

    vocabulary = AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab()
    return {token_id: token for token, token_id in vocabulary.items()}


def vocabulary_sha256(tokens: Mapping[int, str]) -> str:
    """Of every id with its token: equal for equal vocabularies."""
    return hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest()
