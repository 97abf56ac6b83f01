"""Other weights for a draft model: between two exchanges, with nothing of the old ones left."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cluster.drafters.ahead import DraftThread
from cluster.drafters.exchange import ExchangeClient
from cluster.drafters.model import DraftModel
from cluster.drafters.versions import LATEST, MOST_VERSIONS, VersionTally
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Rule, SamplingSpec, VersionGrade
from cluster.models.decoder import Segment
from cluster.models.kv_cache import KVCache
from tests.drafters.fake_decoder import CONTEXT, FakeDecoder, fresh

GREEDY = SamplingSpec(seed=0, temperature=0.0)
PROMPT = [1, 2, 3, 4, 5]


class MirrorDecoder(FakeDecoder):
    """Other weights: its logits are the other's upside down.

    Like the other it fails on keys and values that it did not compute itself.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]`."""
        return -super().logits(hidden)


class Client:
    """One sequence's side of the exchange."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.client = ExchangeClient("e")
        self.text = list(PROMPT)

    def ask(self, num_wanted: int) -> Draft:
        """Its draft."""
        query = DraftQuery(seq_id=1, token_ids=self.text, num_wanted=num_wanted, sampling=GREEDY)
        answer = self.model.exchange(self.client.message([query]))
        draft = self.client.digest(answer)[1]
        assert isinstance(draft, Draft)
        return draft


def draft_model() -> DraftModel:
    return DraftModel(
        FakeDecoder(),  # type: ignore[arg-type]
        num_blocks=2,
        block_size=CONTEXT,
        name="fake",
    )


def run_ahead(model: DraftModel) -> None:
    while model.advance():
        pass


@pytest.mark.parametrize("ahead", [False, True])
def test_after_a_swap_all_is_computed_with_the_new_weights(*, ahead: bool) -> None:
    """The tail of the old ones is gone, their keys and values unused, the context still there."""
    model = draft_model()
    client = Client(model)
    first = client.ask(3)
    expected = fresh(PROMPT, GREEDY, Rule.COUPLED, 4)
    assert first.token_ids == tuple(drawn.token_id for drawn in expected[:3])
    assert first.version == 0
    if ahead:
        run_ahead(model)
    mirror = MirrorDecoder()
    model.swap(mirror, version=7)  # type: ignore[arg-type]
    assert model.num_sequences == 1
    if ahead:
        run_ahead(model)
    client.text += [expected[0].token_id]
    second = client.ask(2)
    assert second.version == 7
    other = DraftModel(MirrorDecoder(), num_blocks=1, block_size=CONTEXT)  # type: ignore[arg-type]
    fresh_client = Client(other)
    fresh_client.text = list(client.text)
    assert second.token_ids == fresh_client.ask(2).token_ids
    assert mirror.num_passes > 0


def test_each_version_is_graded_by_its_own_drafts() -> None:
    """What was drafted before the swap and never decided on counts for neither version."""
    model = draft_model()
    client = Client(model)
    drafted = client.ask(4).token_ids
    client.text += [*drafted[:2], (drafted[2] + 1) % 8]  # two right, the third wrong
    client.ask(4)
    assert model.grades == (VersionGrade(version=0, num_verified=3, num_accepted=2),)
    model.swap(MirrorDecoder(), version=1)  # type: ignore[arg-type]
    client.text += [0, 0]
    drafted = client.ask(2).token_ids
    assert model.grades[1] == VersionGrade(version=1, num_verified=0, num_accepted=0)
    client.text += drafted
    client.ask(2)
    assert model.grades == (
        VersionGrade(version=0, num_verified=3, num_accepted=2),
        VersionGrade(version=1, num_verified=2, num_accepted=2),
    )


def test_the_old_weights_go_on_where_their_count_was() -> None:
    """Sent back, a version has seen what it had seen; the latest count in full, few are kept."""
    tally = VersionTally()
    tally.observe(num_right=3, num_known=4)
    tally.begin(1)
    tally.observe(num_right=0, num_known=4)
    tally.begin(0)
    tally.observe(num_right=2, num_known=2)
    assert tally.version == 0
    assert tally.grades == (
        VersionGrade(version=1, num_verified=1, num_accepted=0),
        VersionGrade(version=0, num_verified=6, num_accepted=5),
    )
    for version in range(2, 20):
        tally.begin(version)
    assert len(tally.grades) == MOST_VERSIONS
    for _ in range(LATEST):
        tally.observe(num_right=1, num_known=1)
    for _ in range(LATEST):
        tally.observe(num_right=0, num_known=1)
    assert tally.grades[-1].num_verified <= LATEST
    assert tally.grades[-1].num_accepted < tally.grades[-1].num_verified / 2


class Recorder:
    """What the draft thread did, in order; an exchange lasts until it is let go on."""

    context_limit = CONTEXT

    def __init__(self) -> None:
        self.version = 0
        self.events: list[str] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.num_ahead = 0

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """Exchanges that began do not end before this does."""
        self.may_go_on.clear()
        try:
            yield
        finally:
            self.may_go_on.set()

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """One version from its beginning to its end."""
        version = self.version
        self.begun.set()
        assert self.may_go_on.wait(timeout=120)
        assert self.version == version
        self.events.append(f"exchange {message.step_id} with {version}")
        return ExchangeOutput(message.step_id, {})

    def advance(self) -> bool:
        """Something once."""
        self.num_ahead += 1
        self.events.append(f"ahead with {self.version}")
        return False

    def swap(self, version: int) -> None:
        """As a draft model's."""
        self.version = version
        self.events.append(f"swap to {version}")


async def test_a_swap_waits_for_the_exchange_and_comes_before_the_next() -> None:
    """No exchange sees two versions; afterwards there is something to do ahead, at once."""
    model = Recorder()
    thread = DraftThread(model, run_ahead=True)
    try:
        with model.stuck():
            first = thread.exchange(ExchangeInput(engine_id="e", step_id=1, wanted=()))
            assert model.begun.wait(timeout=120)
            swapped = thread.change(lambda: model.swap(5))
            second = thread.exchange(ExchangeInput(engine_id="e", step_id=2, wanted=()))
            assert not swapped.done()
        for future in (first, swapped, second):
            await asyncio.wrap_future(future)
        told = [event for event in model.events if not event.startswith("ahead")]
        assert told == ["exchange 1 with 0", "swap to 5", "exchange 2 with 5"]
        before = model.num_ahead
        await asyncio.wrap_future(thread.change(lambda: model.swap(6)))
        while model.num_ahead == before:  # noqa: ASYNC110 - a thread of its own does it
            await asyncio.sleep(0.001)
        assert model.events[-1] == "ahead with 6"
    finally:
        thread.close()


async def test_weights_that_fail_to_take_their_place_change_nothing() -> None:
    """The error goes to whoever swapped; exchanges go on with what there is."""
    model = Recorder()
    thread = DraftThread(model, run_ahead=False)

    def fail() -> None:
        message = "out of memory"
        raise RuntimeError(message)

    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            await asyncio.wrap_future(thread.change(fail))
        await asyncio.wrap_future(
            thread.exchange(ExchangeInput(engine_id="e", step_id=1, wanted=()))
        )
        assert model.events == ["exchange 1 with 0"]
    finally:
        thread.close()


def test_a_decoder_that_reads_what_another_wrote_is_found_out() -> None:
    """The guard of the tests above: without a fresh start they would fail."""
    old, new = FakeDecoder(), MirrorDecoder()
    cache = KVCache.of(old, num_blocks=1, block_size=CONTEXT)  # type: ignore[arg-type]
    old.forward(torch.tensor(PROMPT), [Segment((0,), 0, len(PROMPT))], cache)
    with pytest.raises(KeyError):
        new.forward(torch.tensor([1]), [Segment((0,), len(PROMPT), 1)], cache)
