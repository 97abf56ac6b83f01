"""The screen before the head: the head's own choice, or none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.messages import SamplingSpec, SequenceRows, StepInput
from cluster.models.compiled import CompiledLinear
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder
from cluster.models.screen import MAX_ROWS, Screen, is_screened
from cluster.worker import TargetWorker
from tests.checkpoints import make_checkpoint

VOCAB_SIZE, HIDDEN_SIZE = 9000, 64


@pytest.fixture(scope="module")
def weight() -> Tensor:
    """A head's weight whose rows differ in length, as a real one's do."""
    generator = torch.Generator().manual_seed(1)
    lengths = 0.5 + torch.rand(VOCAB_SIZE, 1, generator=generator)
    return torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) * lengths


def hidden(num_rows: int, *, towards: Tensor, seed: int) -> Tensor:
    """Rows that lean towards some token each, one element of them far larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, HIDDEN_SIZE, generator=generator)
    chosen = torch.randint(len(towards), (num_rows,), generator=generator)
    rows += towards[chosen] * 2 * torch.rand(num_rows, 1, generator=generator)
    rows[:, 5] *= 10
    return rows


def test_it_chooses_as_the_head_does(weight: Tensor) -> None:
    """It answers, with the argmax of the head's logits."""
    screen, head = Screen(weight), CompiledLinear(weight, None)
    for seed in range(200):
        rows = hidden(1 + seed % MAX_ROWS, towards=weight, seed=seed)
        assert screen.largest(rows) == head(rows).argmax(dim=1).tolist()


def test_near_ties_are_decided_as_the_head_does(weight: Tensor) -> None:
    """Two tokens of nearly one weight are told apart by their logits' bits; of one, not here."""
    twins = weight.clone()
    rows = hidden(4, towards=weight, seed=1)
    best = (rows @ weight.T).argmax(dim=1)
    twins[-1] = twins[best[0]]
    assert Screen(twins).largest(rows[:1]) is None
    num_answers = 0
    for place in range(HIDDEN_SIZE):
        twins[-1] = twins[best[0]]
        twins[-1, place] *= 1 + 1e-4
        logits = CompiledLinear(twins, None)(rows[:1])[0]
        found = Screen(twins).largest(rows[:1])
        if logits[-1] == logits[best[0]]:
            assert found is None
        else:
            assert found == [int(logits.argmax())]
            num_answers += 1
    assert num_answers > HIDDEN_SIZE / 2
    assert Screen(twins).largest(rows[1:2]) == [int(best[1])]


def test_what_it_cannot_tell_it_leaves_to_the_head(weight: Tensor) -> None:
    """Many rows, rows of nothing, and rows that are no numbers have no answer."""
    screen = Screen(weight)
    assert screen.largest(hidden(MAX_ROWS + 1, towards=weight, seed=1)) is None
    assert screen.largest(torch.zeros(1, HIDDEN_SIZE)) is None
    assert screen.largest(torch.full((1, HIDDEN_SIZE), torch.nan)) is None


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny model of a vocabulary that is large enough."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "wide",
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
    )
    decoder = load_decoder(folder, dtype="float32")
    assert is_screened(decoder.spec, dtype="float32", device="cpu")
    return decoder


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_greedy_answer_is_the_same_whether_logprobs_are_asked_for(
    decoder: Decoder, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logprobs take the head, and without them the screen will do: token ids are equal."""
    asked: list[bool] = []
    largest = decoder.largest

    def counted(rows: Tensor) -> list[int] | None:
        found = largest(rows)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(decoder, "largest", counted)
    answers = [
        [_answer(decoder, seed, num_drafts=num_drafts, logprobs=logprobs) for seed in range(10)]
        for logprobs in (False, True)
    ]
    assert answers[0] == answers[1]
    assert sum(asked) > 5
    assert len(asked) == 10


def _answer(
    decoder: Decoder, seed: int, *, num_drafts: int, logprobs: bool
) -> tuple[int, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = tuple(torch.randint(VOCAB_SIZE, (12,), generator=generator).tolist())
    worker = TargetWorker(decoder, num_blocks=1, block_size=64)
    sequence = SequenceRows(
        seq_id=1,
        block_table=(0,),
        start=0,
        token_ids=token_ids,
        num_drafts=num_drafts,
        sampling=SamplingSpec(seed=0, temperature=0.0),
        logprobs=logprobs,
    )
    [answer] = worker.step(StepInput(1, (sequence,))).sequences
    return answer.num_accepted, answer.token_ids


def test_only_a_tied_float32_head_has_one(tmp_path: Path) -> None:
    """Elsewhere the exact weights are not at hand."""
    untied = make_checkpoint(tmp_path / "untied", vocab_size=VOCAB_SIZE, tie_word_embeddings=False)
    small = make_checkpoint(tmp_path / "small", tie_word_embeddings=True)
    rows = torch.ones(1, HIDDEN_SIZE)
    assert load_decoder(untied, dtype="float32").largest(rows) is None
    assert load_decoder(small, dtype="float32").largest(rows) is None
    assert load_decoder(small, dtype="int8").largest(rows) is None
