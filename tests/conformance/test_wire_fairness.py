"""Two tenants with keys, ten streams to one, over a real socket: each has what its weight says."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.messages import StepInput, StepOutput
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.keys import KeyOptions, create_key
from deployments.auth import Authenticator
from deployments.fair_use import FairUse
from deployments.keys import KeyRing
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeModel, FakeTarget, SameDrafter
from tests.openai_http import AnyPrompt
from tests.wire import Door, Wire, request, served, until

pytestmark = pytest.mark.wire

NUM_FIRST_STEPS = 50  # until everyone is there
NUM_STEPS = 400


@dataclass(frozen=True)
class Offer:
    """What a tenant keeps in flight, and how its requests look; `mark` is their first token."""

    mark: int
    weight: float
    num_streams: int
    num_prompt: int
    num_answer: int


class FullHouseTarget(FakeTarget):
    """Does a step only once everyone is there again whose answer ended in the one before."""

    def __init__(self, model: FakeModel, **sizes: int) -> None:
        super().__init__(model, **sizes)  # type: ignore[arg-type]
        self.is_full: Callable[[], bool] = lambda: True

    async def step(self, step: StepInput) -> StepOutput:
        """As FakeTarget, in a full house."""
        await until(self.is_full)
        return await super().step(step)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


@pytest.mark.parametrize(
    "offers",
    [
        {"busy": Offer(5, 2.0, 40, 12, 9), "quiet": Offer(6, 1.0, 4, 12, 9)},
        {"busy": Offer(5, 2.0, 40, 4, 30), "quiet": Offer(6, 1.0, 4, 30, 4)},
        {"busy": Offer(5, 1.0, 40, 30, 4), "quiet": Offer(6, 1.0, 4, 4, 30)},
        {"busy": Offer(5, 1.0, 40, 7, 20), "quiet": Offer(6, 2.0, 4, 20, 7)},
    ],
    ids=["alike", "long answers", "long prompts", "quiet is heavy"],
)
async def test_two_tenants_at_ten_to_one_share_by_weight(
    tokenizer: Tokenizer, tmp_path: Path, offers: Mapping[str, Offer]
) -> None:
    """Both always wait, and every draft is right: rows are within 10% of the weights."""
    path = tmp_path / "keys.yaml"
    keys = {
        tenant: create_key(path, tenant, KeyOptions(weight=offer.weight))
        for tenant, offer in offers.items()
    }
    door = Door(Authenticator(KeyRing(path)), fair_use=FairUse())
    async with served(
        tokenizer,
        [65] * 100,
        model=AnyPrompt,
        drafter=SameDrafter,
        target=FullHouseTarget,
        door=door,
        prefix_cache=False,  # every row of every prompt is computed
    ) as wire:
        steps = await steps_of(wire, offers, keys)
    rows = rows_of(steps, {offer.mark: tenant for tenant, offer in offers.items()})
    weights = sum(offer.weight for offer in offers.values())
    for tenant, offer in offers.items():
        share = rows[tenant] / rows.total() / (offer.weight / weights)
        assert 0.9 <= share <= 1.1, rows
    assert {sent.tenant for sent in wire.backend.requests} == offers.keys()


async def steps_of(
    wire: Wire, offers: Mapping[str, Offer], keys: Mapping[str, str]
) -> list[StepInput]:
    """What the target computes while everyone asks again as soon as it is answered."""
    target = wire.target
    assert isinstance(target, FullHouseTarget)
    num_streams = sum(offer.num_streams for offer in offers.values())

    def is_over() -> bool:
        return len(target.steps) >= NUM_FIRST_STEPS + NUM_STEPS

    def is_full() -> bool:
        load = wire.backend.engine.load()
        return is_over() or load.running + load.waiting == num_streams

    async def ask(tenant: str) -> None:
        offer = offers[tenant]
        metadata = (("authorization", f"Bearer {keys[tenant]}"),)
        while not is_over():
            stream = wire.stub.GenerateStream(
                request(
                    token_ids=[offer.mark] * offer.num_prompt,
                    stopping={"max_tokens": offer.num_answer},
                ),
                metadata=metadata,
            )
            chunks = [chunk async for chunk in stream]
            assert sum(len(chunk.token_ids) for chunk in chunks) == offer.num_answer
            assert chunks[-1].speculation.accepted == chunks[-1].speculation.drafted > 0

    target.is_full = is_full
    async with asyncio.TaskGroup() as streams:
        for tenant, offer in offers.items():
            for _ in range(offer.num_streams):
                streams.create_task(ask(tenant))
    return target.steps[: NUM_FIRST_STEPS + NUM_STEPS]


def rows_of(steps: list[StepInput], tenants: Mapping[int, str]) -> Counter[str]:
    """Rows that each tenant had after the first steps, drafts included."""
    owners: dict[int, str] = {}
    rows: Counter[str] = Counter()
    for place, step in enumerate(steps):
        for sequence in step.sequences:
            if sequence.start == 0:
                owners[sequence.seq_id] = tenants[sequence.token_ids[0]]
            if place >= NUM_FIRST_STEPS:
                rows[owners[sequence.seq_id]] += len(sequence.token_ids)
    return rows
