"""A draft worker's weights: loaded beside its exchanges, in use as a whole or not at all."""

import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from cluster.actors.draft import DraftWorker
from cluster.config import DrafthouseConfig, ModelDrafterConfig, TargetConfig
from cluster.messages import Draft, DraftWanted, ExchangeInput, SamplingSpec
from cluster.models.stored import StoredWeights, read_stored
from tests.checkpoints import make_checkpoint

PROMPT = (5, 6, 7, 8)
PATIENCE_SECONDS = 300.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configured weights and others of the same shapes."""
    place = tmp_path_factory.mktemp("drafts")
    return (
        make_checkpoint(place / "one", vocab_size=300),
        make_checkpoint(place / "two", vocab_size=300, seed=5),
    )


@pytest.fixture
def worker(folders: tuple[Path, Path]) -> Iterator[DraftWorker]:
    """A worker in this process, with the first of them."""
    worker = started(folders[0])
    yield worker
    worker._thread.close()


def started(folder: Path) -> DraftWorker:
    target = TargetConfig(model=str(folder), max_model_len=64)
    drafter = ModelDrafterConfig(
        model=str(folder), name="p", max_model_len=64, max_num_seqs=2, num_threads=1
    )
    return DraftWorker(DrafthouseConfig(name="m", target=target), drafter)


def draft(worker: DraftWorker, step_id: int) -> Draft:
    """Four greedy tokens after the prompt."""
    wanted = DraftWanted(
        seq_id=1,
        base_length=0,
        new_token_ids=PROMPT,
        num_wanted=4,
        sampling=SamplingSpec(seed=0, temperature=0.0),
    )
    message = ExchangeInput(engine_id="e", step_id=step_id, wanted=(wanted,), budget_seconds=inf)
    for _ in range(100):  # a context taken anew is drafted for when it is complete
        drafted = worker.exchange(message).drafts[1]
        assert isinstance(drafted, Draft)
        if drafted.token_ids:
            return drafted
        time.sleep(0.01)
    raise AssertionError("nothing was drafted")


def until_version(worker: DraftWorker, version: int) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while worker.load().version != version:
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def test_other_weights_draft_what_a_worker_configured_with_them_drafts(
    worker: DraftWorker, folders: tuple[Path, Path]
) -> None:
    """With their version on every draft; and back again to those configured."""
    configured_with_two = started(folders[1])
    first, other = draft(worker, 1), draft(configured_with_two, 1)
    configured_with_two._thread.close()
    assert first.token_ids != other.token_ids
    worker.adopt(3, read_stored(folders[1]))
    until_version(worker, 3)
    swapped = draft(worker, 2)
    assert (swapped.token_ids, swapped.version) == (other.token_ids, 3)
    worker.adopt(0)
    until_version(worker, 0)
    assert draft(worker, 3) == first


def test_weights_that_cannot_be_loaded_leave_the_present_ones(
    worker: DraftWorker, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """An exchange never meets half a model; why is in the log."""
    whole = read_stored(folders[1])
    partial = StoredWeights({k: v for k, v in whole.tensors.items() if "norm" not in k})
    before = draft(worker, 1)
    worker.adopt(1, partial)
    end = time.monotonic() + PATIENCE_SECONDS
    while "version 1 of p cannot be loaded" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert worker.load().version == 0
    assert draft(worker, 2) == before


def test_of_versions_told_at_once_the_last_one_stays(
    worker: DraftWorker, folders: tuple[Path, Path]
) -> None:
    """However the threads that load them come to their turn."""
    stored = read_stored(folders[1])
    with worker._loading:
        for version in range(1, 6):
            worker.adopt(version, stored)
    until_version(worker, 5)
    worker.adopt(6, stored)
    until_version(worker, 6)
    assert [grade.version for grade in worker.load().grades] == [0, 5, 6]


def test_a_load_tells_of_sequences_and_work(worker: DraftWorker) -> None:
    """What it holds, and which part of its time it computes."""
    assert worker.load().num_sequences == 0
    draft(worker, 1)
    load = worker.load()
    assert load.num_sequences == 1
    assert 0 < load.busy_ratio <= 1
    worker.exchange(ExchangeInput(engine_id="e", step_id=2, wanted=(), finished=(1,)))
    assert worker.load().num_sequences == 0


def test_the_version_is_among_the_metrics(worker: DraftWorker, folders: tuple[Path, Path]) -> None:
    """By model and pool."""
    worker.adopt(2, read_stored(folders[1]))
    until_version(worker, 2)
    samples = {
        name: (labels, value)
        for family in worker.metrics()
        for name, labels, value in family.samples
    }
    assert samples["drafthouse_draft_version"] == ({"model": "m", "pool": "p"}, 2)
