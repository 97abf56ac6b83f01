"""Draft workers that hang, crawl, forget or lie, against an engine without any, in virtual time.

The engine here is its loop alone: it asks, sleeps for as long as a target computes the rows, and
commits the target's tokens. Goodput under 0.9 of the one without drafts must be over in 2 seconds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry
from ray.exceptions import RaySystemError

from cluster.actors.remote_drafter import RemoteDrafter
from cluster.drafters.contexts import DraftContexts
from cluster.engine.proposer import Proposer
from cluster.interfaces import DraftQuery
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Resync, SamplingSpec
from cluster.metrics import EngineMetrics
from tests.actors.fake_ray import FakeDraftWorker, FakeHandle
from tests.goodput import BUCKET, LEAST, WORST_SECONDS, longest_below, rates
from tests.harness import series
from tests.virtual_time import run_virtually

NUM_STREAMS = 8
VOCAB_SIZE = 100
WANTED = 4
SECONDS = 30.0
BEGIN, END = 5.0, 15.0  # of the misbehaviour
NAN = float("nan")


def step_seconds(num_rows: int) -> float:
    """A target whose rows cost something, though little."""
    return 0.040 + 0.0005 * num_rows


def true_token(token_ids: list[int]) -> int:
    """What the target says next."""
    return (token_ids[-1] * 7 + len(token_ids)) % VOCAB_SIZE


def now() -> float:
    return asyncio.get_running_loop().time()


def misbehaving() -> bool:
    return BEGIN <= now() < END


class Honest(FakeDraftWorker):
    """Right with 0.8 a token, in 5 ms. Subclasses misbehave for a while."""

    def __init__(self) -> None:
        self.contexts = DraftContexts(NUM_STREAMS)
        self.random = Random(1)
        self.num_messages = 0

    async def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """As a draft worker."""
        self.num_messages += 1
        await self.delay()
        drafts: dict[int, Draft | Resync] = {}
        for seq_id, context in self.contexts.receive(message).items():
            drafts[seq_id] = Resync() if context is None else self.draft(context.token_ids)
        answer = ExchangeOutput(message.step_id, drafts)
        return self.lie(answer) if misbehaving() else answer

    async def delay(self) -> None:
        """What an exchange takes."""
        await asyncio.sleep(0.005)

    def draft(self, token_ids: list[int]) -> Draft:
        """The truth, mostly."""
        text = list(token_ids)
        for _ in range(WANTED):
            right = self.random.random() < 0.8
            text.append(true_token(text) if right else self.random.randrange(VOCAB_SIZE))
        return Draft(tuple(text[len(token_ids) :]), (), (1.0,) * WANTED, "fake")

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """Not this one."""
        return answer


class Stopped(Honest):
    """Does nothing for ten seconds, then goes on where it was."""

    async def delay(self) -> None:
        """All that is left of the stop."""
        await asyncio.sleep(END - now() if misbehaving() else 0.005)


class Slow(Honest):
    """Takes many times longer than a step."""

    async def delay(self) -> None:
        """Long."""
        await asyncio.sleep(0.5 if misbehaving() else 0.005)


class Crawling(Honest):
    """Becomes slower little by little: no answer is much later than the one before."""

    slowness = 0.005

    async def delay(self) -> None:
        """A tenth longer each time."""
        self.slowness = min(self.slowness * 1.1, 0.8) if misbehaving() else 0.005
        await asyncio.sleep(self.slowness)


class Stuttering(Honest):
    """Is quick and hangs in turn, for 0.4 s each."""

    async def delay(self) -> None:
        """Until it is quick again."""
        hangs = misbehaving() and now() % 0.8 > 0.4
        await asyncio.sleep(0.8 - now() % 0.8 if hangs else 0.005)


class Forgetful(Honest):
    """Starts anew again and again, and has to be told everything each time."""

    async def delay(self) -> None:
        """And the contexts are gone."""
        if misbehaving() and self.random.random() < 0.5:
            self.contexts = DraftContexts(NUM_STREAMS)
        await super().delay()


class Random_(Honest):  # noqa: N801 - the other name is taken
    """Drafts what comes to its mind."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """Ids of the vocabulary, and some that are not."""
        return self.each(
            answer,
            lambda draft: replace(
                draft, token_ids=tuple(self.random.randrange(2 * VOCAB_SIZE) for _ in range(WANTED))
            ),
        )

    def each(self, answer: ExchangeOutput, change: Callable[[Draft], Draft]) -> ExchangeOutput:
        """Every draft, changed."""
        drafts = {
            seq_id: change(draft) if isinstance(draft, Draft) else draft
            for seq_id, draft in answer.drafts.items()
        }
        return ExchangeOutput(answer.step_id, drafts)


class TooLong(Random_):
    """More tokens than wanted, fewer margins than tokens."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """Wrong lengths."""
        return self.each(answer, lambda _: Draft((1,) * 500, (), (1.0,)))


class WrongIds(Random_):
    """Answers for sequences that nobody asked about."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """Others' ids."""
        drafts = {seq_id + 1000: draft for seq_id, draft in answer.drafts.items()}
        return ExchangeOutput(answer.step_id, drafts)


class WrongStep(Random_):
    """Answers a step that is long past."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """An old id."""
        return replace(answer, step_id=answer.step_id - 5)


class NotANumber(Random_):
    """Random drafts with margins that are no numbers."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """NaN."""
        return self.each(super().lie(answer), lambda draft: replace(draft, margins=(NAN,) * WANTED))


class Nonsense(Random_):
    """Says things that are no answers."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """One of many."""
        return self.random.choice(  # type: ignore[no-any-return]
            [None, 7, ExchangeOutput(answer.step_id, None), self.each(answer, lambda _: None)]  # type: ignore[arg-type, list-item, return-value]
        )


class Raising(Honest):
    """Raises instead of answering."""

    def lie(self, answer: ExchangeOutput) -> ExchangeOutput:
        """As a Ray that fails."""
        raise RaySystemError(str(answer))


async def emissions(workers: list[Honest], proposer: Proposer | None) -> list[tuple[float, int]]:
    """When which number of tokens was committed, over SECONDS; every text is the target's own."""
    texts = {seq_id: [seq_id] for seq_id in range(NUM_STREAMS)}
    emitted: list[tuple[float, int]] = []
    while now() < SECONDS:
        queries = [
            DraftQuery(
                seq_id=seq_id,
                token_ids=token_ids,
                num_wanted=WANTED,
                sampling=SamplingSpec(seed=seq_id),
            )
            for seq_id, token_ids in texts.items()
        ]
        drafts = await proposer.propose(queries) if proposer else {}
        num_drafts = sum(len(draft.token_ids) for draft in drafts.values())
        assert num_drafts <= NUM_STREAMS * WANTED
        await asyncio.sleep(step_seconds(NUM_STREAMS + num_drafts))
        num_tokens = 0
        for seq_id, text in texts.items():
            for token_id in (*drafts.get(seq_id, Draft()).token_ids, -1):
                text.append(true_token(text))
                num_tokens += 1
                if text[-1] != token_id:
                    break
        emitted.append((now(), num_tokens))
    del workers
    return emitted


OFF = NUM_STREAMS / step_seconds(NUM_STREAMS)
MISBEHAVIOURS = (
    Stopped,
    Slow,
    Crawling,
    Stuttering,
    Forgetful,
    Random_,
    TooLong,
    WrongIds,
    WrongStep,
    NotANumber,
    Nonsense,
    Raising,
)


def drafted(*workers: Honest, registry: CollectorRegistry) -> list[float]:
    """Tokens a second with these workers."""

    async def run() -> list[tuple[float, int]]:
        drafter = RemoteDrafter("draft", engine_id="engine", context_limit=10**6)
        drafter.set_workers({str(place): FakeHandle(each) for place, each in enumerate(workers)})
        proposer = Proposer(
            drafter,
            deadline_seconds=1.0,
            vocab_size=VOCAB_SIZE,
            metrics=EngineMetrics(registry, model="fake", num_positions=WANTED),
        )
        return await emissions(list(workers), proposer)

    return rates(run_virtually(run()), seconds=SECONDS)


@pytest.mark.parametrize("worker", MISBEHAVIOURS)
def test_a_misbehaving_worker_costs_little_and_not_for_long(
    worker: type[Honest], registry: CollectorRegistry
) -> None:
    """Whatever it does, goodput is under 0.9 of the one without drafts for 2 s at most."""
    achieved = drafted(worker(), registry=registry)
    assert longest_below(achieved, LEAST * OFF) <= WORST_SECONDS
    during = achieved[int(BEGIN / BUCKET) : int(END / BUCKET)]
    assert sum(during) / len(during) >= LEAST * OFF


@pytest.mark.parametrize("worker", [each for each in MISBEHAVIOURS if each is not Raising])
def test_a_worker_that_behaves_again_is_used_again(
    worker: type[Honest], registry: CollectorRegistry
) -> None:
    """Nobody is shut out for ever: at the end the gain is back."""
    achieved = drafted(worker(), registry=registry)
    assert min(achieved[int(2 / BUCKET) : int(BEGIN / BUCKET)]) > 1.5 * OFF
    last = achieved[-int(5 / BUCKET) :]
    assert sum(last) / len(last) > 1.5 * OFF


def test_one_that_hangs_leaves_its_sequences_to_the_others(registry: CollectorRegistry) -> None:
    """With a second worker at hand a stop costs a moment, not the drafts of half the streams."""
    achieved = drafted(Stopped(), Honest(), registry=registry)
    while_stopped = achieved[int((BEGIN + 2) / BUCKET) : int(END / BUCKET)]
    assert min(while_stopped) > 1.5 * OFF


def test_a_worker_that_never_answers_is_asked_once(registry: CollectorRegistry) -> None:
    """It is waited for once, up to the configured deadline, and never sent a second message."""

    class Mute(Honest):
        """Says nothing."""

        async def delay(self) -> None:
            await asyncio.sleep(10 * SECONDS)

    worker = Mute()
    achieved = drafted(worker, registry=registry)
    assert worker.num_messages == 1
    assert min(achieved[int(1.5 / BUCKET) :]) > 0.98 * OFF
    counts = series(registry)
    assert counts["drafthouse_drafter_unavailable_total{reason=late}"] == 1
    assert counts["drafthouse_drafter_unavailable_total{reason=busy}"] > 100
