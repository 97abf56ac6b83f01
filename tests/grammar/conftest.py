"""A byte-level vocabulary of 320 tokens in a model of 330, made without a network."""

import pytest

from cluster.grammar.compiler import GrammarCompiler
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import make_tokenizer

EOS_TOKEN_ID = 2
VOCAB_SIZE = 330


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2's kind; ids 0 to 2 are special."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("grammar"), vocab_size=320))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """For a model that has ten rows more than the tokenizer has tokens."""
    return GrammarCompiler(
        tokenizer.vocabulary,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        vocab_size=VOCAB_SIZE,
    )
