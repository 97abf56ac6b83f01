"""Engines over a tiny random llama and real drafters, and what they answer without speculation."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from cluster.drafters.choice import ChoiceDrafter
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.drafters.ngram import NgramDrafter
from cluster.drafters.silent import NoDrafter
from cluster.engine.engine import Engine
from cluster.engine.limits import EngineLimits
from cluster.errors import DrafterUnavailable
from cluster.interfaces import Drafter, DraftQuery
from cluster.messages import Draft, Rule, SamplingSpec
from cluster.models.decoder import Decoder, Segment
from cluster.models.kv_cache import KVCache
from cluster.request import Request
from cluster.sampling.draw import sample
from cluster.sampling.logprobs import token_log_probs
from cluster.worker import TargetWorker, ThreadTarget
from tests.harness import Answer, Recorder, ask, make_engine, running

EOS_TOKEN_ID = 2  # of the tiny checkpoints


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


async def answered(
    engine: Engine, asked: Sequence[Request], limits: EngineLimits
) -> list[Recorder]:
    """Every request's deltas, all submitted at once; nothing of them is left in the engine."""
    async with running(engine):
        recorders = await ask(engine, asked)
        load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    return recorders


@dataclass
class PlainAnswers:
    """What speculation off answers, by request and longest context; asked for when it is missed."""

    known: dict[tuple[Request, int], Answer] = field(default_factory=dict)

    async def check(
        self,
        recorders: Sequence[Recorder],
        limits: EngineLimits,
        plainly: Callable[[Sequence[Request]], Awaitable[list[Recorder]]],
    ) -> None:
        """Each answer equals the plain one."""
        context = limits.max_model_len
        missing = [r.request for r in recorders if (r.request, context) not in self.known]
        if missing:
            for plain in await plainly(missing):
                assert plain.num_drafted == 0
                self.known[plain.request, context] = plain.answer()
        for recorder in recorders:
            assert recorder.answer() == self.known[recorder.request, context]


@dataclass
class Lab:
    """Builds engines over the tiny models and remembers what speculation off answers."""

    decoders: Mapping[str, Decoder]
    plain_answers: PlainAnswers = field(default_factory=PlainAnswers)

    async def recorders(
        self,
        asked: Sequence[Request],
        drafter_name: str,
        *,
        k: int,
        limits: EngineLimits,
        rule: Rule = Rule.COUPLED,
    ) -> list[Recorder]:
        """Every request's deltas, all submitted at once to an engine of its own."""
        with ExitStack() as stack:
            engine = make_engine(
                self.target(limits, stack),
                self.drafter(drafter_name, limits, stack, rule=rule),
                limits=limits,
                num_speculative_tokens=k,
                eos_token_ids=[EOS_TOKEN_ID],
                rule=rule,
            )
            return await answered(engine, asked, limits)

    async def check_same(self, recorders: Sequence[Recorder], limits: EngineLimits) -> None:
        """Each answer equals the one with speculation off."""
        plain = partial(self.recorders, drafter_name="off", k=0, limits=limits)
        await self.plain_answers.check(recorders, limits, plain)

    def target(self, limits: EngineLimits, stack: ExitStack) -> ThreadTarget:
        """The target with the memory that the limits speak of, closed with the stack."""
        worker = TargetWorker(
            self.decoders["target"], num_blocks=limits.num_blocks, block_size=limits.block_size
        )
        target = ThreadTarget(worker)
        stack.callback(target.close)
        return target

    def drafter(
        self,
        name: str,
        limits: EngineLimits,
        stack: ExitStack,
        *,
        context: int | None = None,
        rule: Rule = Rule.COUPLED,
    ) -> Drafter:
        """A drafter by name, closed with the stack."""
        if name == "dying":
            return Failing(self.drafter("same", limits, stack, rule=rule), late=False)
        if name == "late":  # in front of one that is never late by itself
            return Failing(NgramDrafter(), late=True)
        if name == "ngram":
            return NgramDrafter()
        if name == "choice":
            names = ("dying", *sorted(self.decoders.keys() - {"target"}))
            return ChoiceDrafter(
                free=[NgramDrafter(tenant_memory_tokens=1000)],
                paid=[self.drafter(each, limits, stack, rule=rule) for each in names],
                patience_seconds=5.0,
            )
        if name in ("off", "silent"):
            return NoDrafter()
        draft_model = DraftModel(
            self.decoders[{"same": "target"}.get(name, name)],
            num_blocks=limits.max_num_seqs,
            block_size=context or limits.max_model_len,
        )
        drafter = ModelDrafter(draft_model, name=name, rule=rule)
        stack.callback(drafter.close)
        return drafter


def row_by_row(
    decoder: Decoder, request: Request, num_tokens: int
) -> tuple[list[int], list[float]]:
    """Tokens and logprobs of plain decoding, each position computed alone; no engine."""
    sampling = request.sampling
    spec = SamplingSpec(seed=sampling.seed, temperature=sampling.temperature)
    cache = KVCache.of(decoder, num_blocks=1, block_size=256)
    token_ids = list(request.prompt_token_ids)
    logprobs: list[float] = []
    for position in range(len(token_ids) + num_tokens - 1):
        row = torch.tensor(token_ids[position : position + 1])
        hidden = decoder.forward(row, [Segment((0,), position, 1)], cache)
        if position == len(token_ids) - 1:
            logits = decoder.logits(hidden)
            token_ids += sample(logits, [spec], [position + 1])
            logprobs += token_log_probs(logits, token_ids[-1:])
    return token_ids[len(request.prompt_token_ids) :], logprobs
