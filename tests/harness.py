"""Runs an engine under test and says what each request got."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from cluster.control.policy import FixedPolicy, Policy
from cluster.engine.engine import Engine
from cluster.engine.limits import USUAL_PROMPT_ROWS, EngineLimits
from cluster.interfaces import Drafter, Target
from cluster.messages import Rule, SamplingSpec, StepInput, TokenDelta
from cluster.metrics import EngineMetrics
from cluster.request import FinishReason, Request, SamplingParams, SpeculationParams, StoppingParams
from tests.fakes import EOS_TOKEN_ID, FakeModel, FakeTarget

GREEDY = SamplingParams(seed=0, temperature=0.0)
SAMPLED = SamplingParams(seed=7, temperature=1.0)
SUMMED = {"model", "drafter", "tenant"}  # labels that `series` sums over


@dataclass(frozen=True)
class Answer:
    """What must be the same with and without speculation: ids, logprob bits, reason, usage."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Completion tokens, as usage says."""
        return len(self.token_ids)


@dataclass
class Recorder:
    """Takes a request's deltas, and asserts that they are a legal stream."""

    request: Request
    deltas: list[TokenDelta] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, delta: TokenDelta) -> None:
        """The `emit` of the request."""
        assert not self.finished.is_set(), "a delta after the last one"
        assert delta.request_id == self.request.request_id
        assert 0 <= delta.num_accepted <= min(delta.num_drafted, len(delta.token_ids))
        assert len(delta.logprobs) == (len(delta.token_ids) if self.request.logprobs else 0)
        assert len(delta.top_logprobs) == (len(delta.token_ids) if self.request.top_logprobs else 0)
        assert delta.token_ids or delta.finish_reason is not None, "an empty delta"
        if not delta.token_ids or any(earlier.token_ids for earlier in self.deltas):
            assert not delta.prompt_logprobs, "twice, or without a token"
            assert not delta.num_cached_tokens, "twice, or without a token"
        assert 0 <= delta.num_cached_tokens <= len(self.request.prompt_token_ids)
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.finished.set()

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(delta.num_cached_tokens for delta in self.deltas)

    @property
    def prompt_logprobs(self) -> tuple[float, ...]:
        """Logprobs of the prompt's tokens but the first, if these came."""
        return tuple(logprob for delta in self.deltas for logprob in delta.prompt_logprobs)

    @property
    def num_drafted(self) -> int:
        """Drafts verified over all steps."""
        return sum(delta.num_drafted for delta in self.deltas)

    @property
    def num_accepted(self) -> int:
        """Drafts emitted over all steps."""
        return sum(delta.num_accepted for delta in self.deltas)

    def answer(self) -> Answer:
        """All deltas together."""
        return Answer(
            token_ids=tuple(token for delta in self.deltas for token in delta.token_ids),
            logprobs=tuple(logprob for delta in self.deltas for logprob in delta.logprobs),
            finish_reason=self.deltas[-1].finish_reason if self.deltas else None,
            num_prompt_tokens=len(self.request.prompt_token_ids),
        )


def make_request(  # noqa: PLR0913 - the fields of a request, flat
    prompt_token_ids: Iterable[int],
    *,
    request_id: str = "request",
    sampling: SamplingParams = GREEDY,
    max_tokens: int | None = 20,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    speculation: SpeculationParams | None = None,
    output_token_ids: tuple[int, ...] = (),
) -> Request:
    """A request with logprobs, flat."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=sampling,
        stopping=StoppingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        ),
        speculation=speculation or SpeculationParams(),
        logprobs=True,
        output_token_ids=output_token_ids,
    )


def make_limits(**changes: float | None) -> EngineLimits:
    """Limits for tiny tests: one block a context unless `block_size` or `num_blocks` say else.

    No clock decides what is in a step, unless `max_prompt_rows_beside_decodes` is None.
    """
    max_model_len = int(changes.get("max_model_len") or 256)
    max_num_seqs = int(changes.get("max_num_seqs") or 4)
    block_size = int(changes.get("block_size") or max_model_len)
    sizes = {
        "vocab_size": 32,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 64,
        "max_num_waiting": 1000,
        "block_size": block_size,
        "num_blocks": max_num_seqs * -(-max_model_len // block_size),
        "draft_deadline_seconds": 5.0,
        "max_prompt_rows_beside_decodes": USUAL_PROMPT_ROWS,
    } | changes
    return EngineLimits(**sizes)  # type: ignore[arg-type]


def make_engine(
    target: Target,
    drafter: Drafter,
    *,
    limits: EngineLimits,
    num_speculative_tokens: int = 4,
    eos_token_ids: Iterable[int] = (EOS_TOKEN_ID,),
    registry: CollectorRegistry | None = None,
    rule: Rule = Rule.COUPLED,
    policy: Policy | None = None,
) -> Engine:
    """An engine of its own registry unless one is given, with a fixed K unless a policy is."""
    return Engine(
        target=target,
        drafter=drafter,
        policy=policy or FixedPolicy(num_speculative_tokens),
        limits=limits,
        eos_token_ids=frozenset(eos_token_ids),
        metrics=EngineMetrics(registry or CollectorRegistry(), model="fake", num_positions=16),
        rule=rule,
    )


def make_fake_target(
    limits: EngineLimits, during_step: Callable[[StepInput], object] = lambda _: None
) -> FakeTarget:
    """A fake target with the memory that the limits speak of."""
    return FakeTarget(
        FakeModel(limits.vocab_size),
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        during_step=during_step,
    )


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """The engine's loop runs inside the block. A failure of it that nobody awaited is raised."""
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def ask(engine: Engine, requests: Iterable[Request]) -> list[Recorder]:
    """Submit all requests at once and wait until all have ended; the engine must be running."""
    recorders = [Recorder(request) for request in requests]
    for recorder in recorders:
        engine.submit(recorder.request, recorder)
    await asyncio.gather(*(recorder.finished.wait() for recorder in recorders))
    return recorders


def reference(
    model: FakeModel,
    request: Request,
    *,
    max_model_len: int,
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID}),
) -> Answer:
    """The request's answer, row by row from the model alone: no engine, no drafts, no batch."""
    stopping = request.stopping
    stop_token_ids = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else eos_token_ids)}
    sampling = SamplingSpec(
        seed=request.sampling.seed,
        temperature=request.sampling.temperature,
        suppressed_token_ids=tuple(stop_token_ids),
        suppressed_before=len(request.prompt_token_ids) + stopping.min_tokens,
    )
    token_ids = [*request.prompt_token_ids, *request.output_token_ids]
    num_given = len(token_ids)
    logprobs: list[float] = []
    reason = None
    while reason is None:
        state = model.state(token_ids)
        token_ids.append(model.next_token(state, len(token_ids), sampling))
        logprobs.append(model.logprob(state, token_ids[-1]))
        num_output = len(token_ids) - len(request.prompt_token_ids)
        if token_ids[-1] in stop_token_ids:
            reason = FinishReason.STOP
        elif num_output == stopping.max_tokens or len(token_ids) == max_model_len:
            reason = FinishReason.LENGTH
    return Answer(
        token_ids=tuple(token_ids[num_given:]),
        logprobs=tuple(logprobs),
        finish_reason=reason,
        num_prompt_tokens=len(request.prompt_token_ids),
    )


async def fake_answers(
    asked: Iterable[Request], drafter: Drafter, *, k: int, limits: EngineLimits
) -> list[Recorder]:
    """All answers of an engine of its own; nothing is left in it."""
    engine = make_engine(make_fake_target(limits), drafter, limits=limits, num_speculative_tokens=k)
    async with running(engine):
        recorders = await ask(engine, asked)
        load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, limits.num_blocks)
    return recorders


def check_same(recorders: Iterable[Recorder], limits: EngineLimits) -> None:
    """Each answer is the fake model's own."""
    for recorder in recorders:
        expected = reference(
            FakeModel(limits.vocab_size), recorder.request, max_model_len=limits.max_model_len
        )
        assert recorder.answer() == expected


def series(registry: CollectorRegistry) -> Mapping[str, float]:
    """Every sample by `name{label=value,...}`, summed over model, drafter and tenant."""
    values: dict[str, float] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k not in SUMMED)
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            values[name] = values.get(name, 0) + sample.value
    return values
