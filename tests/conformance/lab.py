"""Engines over tiny random models and real drafters, and what they answer without speculation."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cluster.actors.remote_drafter import RemoteDrafter
from cluster.config import SkipDrafterConfig
from cluster.drafters.ahead import DraftThread
from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.drafters.skipping import SkipDrafter
from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.errors import DrafterUnavailable
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.states import GrammarStates
from cluster.interfaces import Drafter, DraftQuery
from cluster.local_drafter import part_of
from cluster.messages import Draft, ExchangeInput, ExchangeOutput, Rule
from cluster.models.decoder import Decoder
from cluster.request import Request
from cluster.text.tokenizer import load_vocabulary
from cluster.worker import TargetWorker, ThreadTarget
from tests.actors.fake_ray import FakeDraftWorker, FakeHandle
from tests.conformance.answers import PlainAnswers, answered
from tests.harness import Recorder, make_engine

EOS_TOKEN_ID = 2  # of the tiny checkpoints
VOCAB_SIZE = 512  # of those that have a tokenizer

Wrap = Callable[[Drafter], Drafter]


class Failing:
    """Another drafter that after three answers fails for ever, by dying or by being late."""

    def __init__(self, drafter: Drafter, *, late: bool) -> None:
        self._drafter = drafter
        self._late = late
        self._left = 3

    @property
    def name(self) -> str:
        """As the other's."""
        return self._drafter.name

    @property
    def context_limit(self) -> int | None:
        """As the other's."""
        return self._drafter.context_limit

    async def propose(self, queries: Sequence[DraftQuery]) -> Mapping[int, Draft]:
        """The other's drafts, three times."""
        self._left -= 1
        if self._left >= 0:
            return await self._drafter.propose(queries)
        if self._late:
            await asyncio.Event().wait()
        raise DrafterUnavailable("died")

    def release(self, seq_ids: Iterable[int]) -> None:
        """As the other."""
        self._drafter.release(seq_ids)


@dataclass(frozen=True)
class DraftProcess(FakeDraftWorker):
    """A draft worker as far as an engine calls it: drafts ahead in a thread of its own."""

    thread: DraftThread

    async def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """What the model answers."""
        return await asyncio.wrap_future(self.thread.exchange(message))


@dataclass(frozen=True)
class Place:
    """Where a drafter is to draft: for which target, and how what it drafts is verified.

    What it starts is closed with the `stack`. Its `context` is the target's unless it is given.
    """

    worker: TargetWorker
    target: ThreadTarget
    limits: EngineLimits
    stack: ExitStack
    k: int = 4
    rule: Rule = Rule.COUPLED
    context: int | None = None


@dataclass
class Lab:
    """Builds engines over the tiny models and remembers what speculation off answers.

    Grammars are those of the tokenizer in the target's `folder`. The drafter "skip" is the target
    without what is `skipped`.
    """

    decoders: Mapping[str, Decoder]
    folder: Path | None = None
    skipped: SkipDrafterConfig = field(
        default_factory=lambda: SkipDrafterConfig(skip_layers=(1,)), kw_only=True
    )
    plain_answers: PlainAnswers = field(default_factory=PlainAnswers, kw_only=True)

    async def recorders(
        self,
        asked: Sequence[Request],
        drafter_name: str,
        *,
        k: int,
        limits: EngineLimits,
        rule: Rule = Rule.COUPLED,
        wrap: Wrap | None = None,
        concurrency: int | None = None,
    ) -> list[Recorder]:
        """Every request's deltas, from an engine of its own; `answered` says when they come."""
        with self.engine(drafter_name, k=k, limits=limits, rule=rule, wrap=wrap) as engine:
            return await answered(engine, asked, limits, concurrency=concurrency)

    async def check_same(self, recorders: Sequence[Recorder], limits: EngineLimits) -> None:
        """Each answer equals the one with speculation off."""
        plain = partial(self.recorders, drafter_name="off", k=0, limits=limits)
        await self.plain_answers.check(recorders, limits, plain)

    @contextmanager
    def engine(
        self,
        drafter_name: str,
        *,
        k: int,
        limits: EngineLimits,
        rule: Rule = Rule.COUPLED,
        context: int | None = None,
        wrap: Wrap | None = None,
    ) -> Iterator[Engine]:
        """An engine that does not run yet."""
        with ExitStack() as stack:
            worker = self.worker(limits)
            target = ThreadTarget(worker)
            stack.callback(target.close)
            place = Place(worker, target, limits, stack, k=k, rule=rule, context=context)
            drafter = self.drafter(drafter_name, place)
            yield make_engine(
                target,
                drafter if wrap is None else wrap(drafter),
                limits=limits,
                num_speculative_tokens=k,
                eos_token_ids=[EOS_TOKEN_ID],
                rule=rule,
            )

    def worker(self, limits: EngineLimits) -> TargetWorker:
        """A target with the memory that the limits speak of."""
        return TargetWorker(
            self.decoders["target"],
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            grammars=None if self.folder is None else grammars_of(self.folder),
        )

    def drafter(self, name: str, place: Place) -> Drafter:
        """A drafter by name; a model's own name is one in a thread, "remote" before it a worker."""
        makers: dict[str, Callable[[Place], Drafter]] = {
            "off": lambda _: NoDrafter(),
            "silent": lambda _: NoDrafter(),
            "ngram": lambda _: NgramDrafter(),
            "dying": lambda place: Failing(self.drafter("same", place), late=False),
            "late": lambda _: Failing(NgramDrafter(), late=True),  # that is never so by itself
            "choice": self._choice,
            "skip": self._skip,
        }
        if name in makers:
            return makers[name](place)
        kind, _, weights = name.rpartition(" ")
        if kind == "remote":
            return self._remote(weights, place)
        drafter = ModelDrafter(self._draft_model(weights, place), name=name, rule=place.rule)
        place.stack.callback(drafter.close)
        return drafter

    def _choice(self, place: Place) -> ChoiceDrafter:
        names = ("dying", *sorted(self.decoders.keys() - {"target"}))
        return ChoiceDrafter(
            free=[NgramDrafter(tenant_memory_tokens=1000)],
            paid=[self.drafter(name, place) for name in names],
            patience_seconds=5.0,
        )

    def _skip(self, place: Place) -> SkipDrafter:
        worker = place.worker
        part = part_of(worker.decoder, self.skipped)
        return SkipDrafter(part, worker.cache, thread=place.target, name="skip", rule=place.rule)

    def _remote(self, weights: str, place: Place) -> RemoteDrafter:
        model = self._draft_model(weights, place)
        thread = DraftThread(model, run_ahead=True)
        handle = FakeHandle(DraftProcess(thread))
        place.stack.callback(thread.close)
        place.stack.callback(handle.kill)
        drafter = RemoteDrafter(
            weights,
            engine_id="engine",
            context_limit=model.context_limit,
            rule=place.rule,
            most_seconds=place.limits.draft_deadline_seconds,
            weighs=False,
        )
        drafter.set_workers({"worker": handle})
        place.stack.callback(drafter.set_workers, {})  # or it would call while the loop ends
        return drafter

    def _draft_model(self, name: str, place: Place) -> DraftModel:
        return DraftModel(
            self.decoders[{"same": "target"}.get(name, name)],
            num_blocks=place.limits.max_num_seqs,
            block_size=place.context or place.limits.max_model_len,
        )


def grammars_of(folder: Path) -> GrammarStates:
    """As `cluster.local` makes them, for a tiny checkpoint."""
    return GrammarStates(
        lambda: GrammarCompiler(
            load_vocabulary(folder),
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            vocab_size=VOCAB_SIZE,
        )
    )
