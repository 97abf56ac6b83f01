"""A verifier that is wrong now and then is found, and one that is right never accused."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from cluster.engine.engine import Engine
from cluster.errors import Overloaded
from cluster.messages import ModelInfo, Rule, SequenceRows, SequenceTokens, TokenDelta
from cluster.metrics import GatewayMetrics
from cluster.request import Request, SpeculationParams
from deployments.probe import (
    MAX_WAITING,
    PRIORITY,
    Divergence,
    ProbedBackend,
    Told,
    again,
    first_divergence,
    is_probed,
)
from tests.fakes import FakeModel, FakeTarget, SiblingDrafter
from tests.harness import (
    GREEDY,
    SAMPLED,
    make_engine,
    make_limits,
    make_request,
    running,
    series,
)
from tests.wire import EngineBackend

INFO = ModelInfo(name="fake", max_model_len=64, vocab_size=32, drafters=("sibling",))
LIMITS = make_limits(max_model_len=64, max_num_seqs=MAX_WAITING + 1)
PROBES = "drafthouse_losslessness_probes_total"
TOLD = {"position", "kind", "num_tokens", "num_prompt_tokens", "seed"}
DIVERGENCES = "drafthouse_losslessness_divergences_total"


class WrongTarget(FakeTarget):
    """Of every thousand tokens it emits, one is a draft that it should have rejected."""

    def __init__(self, model: FakeModel, **sizes: int) -> None:
        super().__init__(model, **sizes)  # type: ignore[arg-type]
        self._random = random.Random(3)
        self._owed = 0.0
        self.num_wrong = 0

    def _compute(self, rows: SequenceRows) -> SequenceTokens | None:
        answer = super()._compute(rows)
        if answer is None or rows.sampling is None:
            return answer
        self._owed += len(answer.token_ids) / 1000
        if self._owed < 1 or answer.num_accepted == rows.num_drafts:
            return answer
        self._owed -= 1
        self.num_wrong += 1
        drafts = rows.token_ids[len(rows.token_ids) - rows.num_drafts :]
        position = rows.start + len(rows.token_ids) - rows.num_drafts + answer.num_accepted
        state = self._cells[self._place(rows, position)].state
        following = self._model.next_token(state, position + 1, rows.sampling)
        token_ids = (*drafts[: answer.num_accepted + 1], following)
        return replace(
            answer,
            num_accepted=answer.num_accepted + 1,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids) if rows.logprobs else (),
        )


class Served:
    """A probed engine, and what it counted."""

    def __init__(self, engine: Engine, target: FakeTarget, **options: object) -> None:
        self.target = target
        self.engine_backend = EngineBackend(engine, INFO)
        self.registry = CollectorRegistry()
        settings = {"share": 1.0, "has_room": lambda: True} | options
        self.backend = ProbedBackend(
            self.engine_backend,
            GatewayMetrics(self.registry, model="fake"),
            **settings,  # type: ignore[arg-type]
        )

    async def answer(self, requests: list[Request]) -> None:
        """All answers, as many at once as can be given again, and then those again."""
        for begin in range(0, len(requests), MAX_WAITING):
            batch = requests[begin : begin + MAX_WAITING]
            await asyncio.gather(*(self._deltas(request) for request in batch))
            await self.backend.settle()

    async def _deltas(self, request: Request) -> list[TokenDelta]:
        return [delta async for delta in self.backend.generate(request)]

    def counted(self, name: str) -> float:
        """A counter's value."""
        return series(self.registry)[name]


@asynccontextmanager
async def served(
    target: Callable[..., FakeTarget] = FakeTarget, **options: object
) -> AsyncIterator[Served]:
    """An engine that runs inside the block, and is empty afterwards."""
    fake = target(
        FakeModel(LIMITS.vocab_size),
        num_blocks=LIMITS.num_blocks,
        block_size=LIMITS.block_size,
        max_model_len=LIMITS.max_model_len,
    )
    engine = make_engine(fake, SiblingDrafter(FakeModel(LIMITS.vocab_size)), limits=LIMITS)
    async with running(engine):
        probed = Served(engine, fake, **options)
        try:
            yield probed
        finally:
            probed.backend.close()
        assert engine.load().running == engine.load().waiting == 0


def asked(count: int, *, max_tokens: int) -> list[Request]:
    """Greedy and seeded requests in turn, of prompts that differ."""
    return [
        replace(
            make_request(
                (number % 31 + 1, number // 31 % 31 + 1, number // 961 + 1),
                request_id=str(number),
                sampling=replace(SAMPLED, seed=number) if number % 2 else GREEDY,
                max_tokens=max_tokens,
            ),
            logprobs=number % 3 == 0,
        )
        for number in range(count)
    ]


async def test_a_wrong_token_in_a_thousand_is_found_within_200_probes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Greedy and seeded; the log says where and of which request, and no token of it."""
    requests = [
        replace(request, stopping=replace(request.stopping, ignore_eos=True))
        for request in asked(200, max_tokens=30)
    ]
    with caplog.at_level(logging.ERROR, "deployments.probe"):
        async with served(WrongTarget) as probed:
            await probed.answer(requests)
    wrong = probed.target
    assert isinstance(wrong, WrongTarget)
    assert probed.counted(PROBES) == 200
    assert 0 < probed.counted(DIVERGENCES) <= wrong.num_wrong <= 2 * 200 * 30 / 1000
    assert len(caplog.records) == probed.counted(DIVERGENCES)
    for record in caplog.records:
        assert record.fields.keys() == TOLD  # type: ignore[attr-defined]
        assert record.fields["kind"] in {"token", "logprob"}  # type: ignore[attr-defined]


async def test_2000_clean_requests_raise_no_alarm() -> None:
    """Greedy and seeded, with logprobs and without, ended by EOS and by length."""
    async with served() as probed:
        await probed.answer(asked(2000, max_tokens=8))
    assert probed.counted(PROBES) == 2000
    assert probed.counted(DIVERGENCES) == 0


async def test_an_answer_that_was_cut_short_is_compared_as_far_as_it_went() -> None:
    """A stop text ends an answer before the engine does: its tokens so far are compared."""
    async with served() as probed:
        answer = probed.backend.generate(asked(1, max_tokens=50)[0])
        async for _ in answer:
            break
        await answer.aclose()
        await probed.backend.settle()
    assert (probed.counted(PROBES), probed.counted(DIVERGENCES)) == (1, 0)


async def test_only_a_share_is_probed_and_only_where_there_is_room() -> None:
    """What finds no room waits, and of these all but a few are let go."""
    draws = iter([0.1, 0.9] * 10)
    async with served(share=0.5, draw=lambda: next(draws)) as probed:
        await probed.answer(asked(8, max_tokens=4))
        assert probed.counted(PROBES) == 4
    room: list[bool] = []
    async with served(has_room=lambda: bool(room)) as probed:
        for request in asked(3 * MAX_WAITING, max_tokens=4):
            await probed._deltas(request)
        assert probed.counted(PROBES) == 0
        room.append(True)
        await probed.backend.settle()
        assert probed.counted(PROBES) <= MAX_WAITING + 1


async def test_a_probe_that_is_refused_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has become busy, or gone, proves nothing; the next probe is made."""

    async def refuse(request: Request) -> AsyncIterator[TokenDelta]:
        raise Overloaded(waiting=1, limit=1)
        yield TokenDelta(request_id=request.request_id)

    async with served() as probed:
        async for _ in probed.backend.generate(asked(1, max_tokens=4)[0]):
            monkeypatch.setattr(probed.engine_backend, "generate", refuse)
        await probed.backend.settle()
        assert probed.counted(PROBES) == 0
        monkeypatch.undo()
        await probed.answer(asked(1, max_tokens=4))
        assert (probed.counted(PROBES), probed.counted(DIVERGENCES)) == (1, 0)


def test_the_same_request_without_its_owner() -> None:
    """Same prompt, sampling and seed; no drafts, nobody's tenant, last in line, a cache apart."""
    request = replace(
        make_request((1, 2), sampling=SAMPLED), tenant="a", cache_salt="salt", deadline_seconds=1.0
    )
    probe = again(request, Told([4, 5, 6], [0.0] * 3))
    assert probe.sampling == request.sampling
    assert probe.prompt_token_ids == request.prompt_token_ids
    assert probe.stopping.max_tokens == 3
    assert not probe.speculation.enabled
    assert (probe.tenant, probe.priority, probe.deadline_seconds) == ("", PRIORITY, None)
    assert probe.cache_salt not in {"", "salt", again(request, Told([4], [0.0])).cache_salt}


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (Told([1, 2, 3], [0.1, 0.2, 0.3]), None),
        (Told([1, 7, 3], [0.1, 0.2, 0.3]), Divergence(1, "token")),
        (Told([1, 2, 3], [0.1, 0.2, 0.30000000000000004]), Divergence(2, "logprob")),
        (Told([1, 2], [0.1, 0.2]), Divergence(2, "length")),
    ],
)
def test_where_two_answers_part(theirs: Told, expected: Divergence | None) -> None:
    """The first place that differs, by a bit or by the end."""
    assert first_divergence(Told([1, 2, 3], [0.1, 0.2, 0.3]), theirs) == expected


def test_what_proves_nothing_is_not_probed() -> None:
    """No drafts, a rule under which drafts say which sample is drawn, an engine whose bits vary."""
    greedy, sampled = make_request((1,), sampling=GREEDY), make_request((1,), sampling=SAMPLED)
    ratio = replace(INFO, verification=Rule.RATIO)
    assert is_probed(greedy, INFO)
    assert is_probed(sampled, INFO)
    assert is_probed(greedy, ratio)
    assert not is_probed(sampled, ratio)
    assert not is_probed(greedy, replace(INFO, variant_operations=("linear",)))
    assert not is_probed(replace(greedy, speculation=SpeculationParams(enabled=False)), INFO)
