"""The self-check: silent about what is bit-exact, and it names what is not."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster import self_check
from cluster.models.decoder import Segment
from cluster.models.load import load_decoder
from cluster.worker import TargetWorker
from tests.checkpoints import make_checkpoint
from tests.test_worker import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_NEW,
    SEEDED,
    Answer,
    Spy,
    load,
    plain,
    prompt_of,
    step,
)

SINGLE, CHUNKS = "single rows", "prompt chunks"
BESIDE, TRUNCATE = "rows beside other sequences", "rows after a truncate"
# What is added to the rows after the last layer, and the schedules in which that shows.
DISTURBANCES: dict[str, tuple[Callable[[Sequence[Segment]], float], tuple[str, ...]]] = {
    "by company": (lambda segments: 1e-5 * (len(segments) - 1), (BESIDE, TRUNCATE)),
    "alone in a step": (lambda segments: 1e-5 * (num_rows(segments) == 1), (SINGLE,)),
    "by row count": (
        lambda segments: 1e-5 * num_rows(segments),
        (SINGLE, CHUNKS, BESIDE, TRUNCATE),
    ),
}


def num_rows(segments: Sequence[Segment]) -> int:
    return sum(segment.num_rows for segment in segments)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide inside as small real models are: kernels sum long rows in other ways than short."""
    folder = tmp_path_factory.mktemp("wide")
    return make_checkpoint(folder, hidden_size=64, intermediate_size=1536, num_layers=1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("block_size", [16, 64, 2048])
def test_it_finds_nothing_on_cpu(wide: Path, dtype: str, block_size: int) -> None:
    """float32 and int8 are bit-exact here, whatever the block layout."""
    worker = TargetWorker(load(wide, dtype), num_blocks=1, block_size=block_size)
    assert worker.self_check() == ()


def test_it_fits_a_short_context(tmp_path: Path) -> None:
    """A model with fewer positions than the check would like is checked within them."""
    folder = make_checkpoint(tmp_path, vocab_size=20, max_position_embeddings=9, hidden_size=32)
    worker = TargetWorker(load_decoder(folder, dtype="float32"), num_blocks=1, block_size=9)
    assert worker.self_check() == ()


@pytest.mark.parametrize("name", DISTURBANCES)
def test_it_names_the_schedules_that_differ(checkpoints: dict[str, Path], name: str) -> None:
    """A decoder whose last bits depend on the rest of the step is found out, by schedule."""
    disturb, expected = DISTURBANCES[name]
    spy = Spy(load(checkpoints["target"]), disturb)
    worker = TargetWorker(spy, num_blocks=1, block_size=16)  # type: ignore[arg-type]
    assert worker.self_check() == expected


@pytest.mark.parametrize("name", [SINGLE, BESIDE, TRUNCATE])
def test_it_looks_where_there_are_many_keys(checkpoints: dict[str, Path], name: str) -> None:
    """A decoder that is exact up to some hundred keys and not beyond is found out."""
    disturb = {
        SINGLE: lambda segments: 1e-5 * (num_rows(segments) == 1),
        BESIDE: lambda segments: 1e-5 * (len(segments) == 3),
        TRUNCATE: lambda segments: 1e-5 * (len(segments) == 2),
    }[name]
    far = Spy(
        load(checkpoints["target"]),
        lambda segments: disturb(segments) * any(segment.start > 300 for segment in segments),
    )
    worker = TargetWorker(far, num_blocks=1, block_size=16)  # type: ignore[arg-type]
    assert worker.self_check() == (name,)


@pytest.mark.parametrize("name", ["sample", "distribution", "top_log_probs"])
def test_it_covers_every_result_of_sampling(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Tokens, distributions and top logprobs that depend on how many rows there are."""
    honest = getattr(self_check, name)
    monkeypatch.setattr(
        self_check,
        name,
        lambda logits, *args, **kwargs: honest(logits * (1 + 0.5 * len(logits)), *args, **kwargs),
    )
    worker = TargetWorker(load(checkpoints["target"]), num_blocks=1, block_size=16)
    assert worker.self_check() == ("sampling",)


def test_it_covers_sampling(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs that depend on how many rows there are are found out, too."""
    log_probs = self_check.token_log_probs
    monkeypatch.setattr(
        self_check,
        "token_log_probs",
        lambda logits, token_ids: log_probs(logits * (1 + 1e-4 * len(logits)), token_ids),
    )
    worker = TargetWorker(load(checkpoints["target"]), num_blocks=1, block_size=16)
    assert worker.self_check() == ("sampling",)


def test_it_leaves_live_memory_alone(checkpoints: dict[str, Path]) -> None:
    """A sequence in progress goes on as if nothing had happened."""
    decoder = load(checkpoints["target"])
    worker = TargetWorker(decoder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    answer = Answer(prompt_of(30), SEEDED)
    while len(answer.token_ids) < NUM_NEW:
        step(worker, [answer], [answer.rows()])
        if len(answer.token_ids) == 5:
            worker.self_check()
    assert answer.token_ids == plain(decoder, prompt_of(30), SEEDED).token_ids
