"""Engines to be compared: in one process, in turn, in one computing thread."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from cluster.config import (
    BesideConfig,
    DrafthouseConfig,
    DType,
    ModelDrafterConfig,
    SpeculationConfig,
    TargetConfig,
    drafter_from_flag,
)
from cluster.control.adaptive import AdaptivePolicy
from cluster.control.cost import CostTable
from cluster.control.policy import FixedPolicy, Policy, StepShape
from cluster.drafters.heads.kinds import kind_of
from cluster.drafters.model import DraftModel, ModelDrafter
from cluster.engine.engine import Engine
from cluster.interfaces import Drafter
from cluster.local import build_target_worker, stand_engine, use_threads
from cluster.local_drafter import (
    build_beside_target,
    build_draft_model,
    build_drafter,
    check_draft,
    close_drafter,
)
from cluster.messages import ExchangeInput, ExchangeOutput, Rule, StepInput, StepOutput
from cluster.models.decoder import Decoder
from cluster.models.load import load_decoder, load_spec
from cluster.models.reference import load_generation_defaults, resolve
from cluster.profiling.steps import measure_points
from cluster.request import Request
from cluster.tools.bench.figures import Spent, Wave
from cluster.tools.bench.streams import run_together
from cluster.worker import TargetWorker

T = TypeVar("T")

OFF = "off"
PROFILE_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the engines that are compared: without a drafter, or with one and its K.

    Where the controller decides, the K is the most it may decide on.
    """

    dtype: DType
    draft: str = OFF
    num_speculative_tokens: int | None = None
    controlled: bool = False

    def config(self, target: TargetConfig, speculation: SpeculationConfig) -> DrafthouseConfig:
        """The configuration; a draft model has the target's number format and sizes."""
        target = target.model_copy(update={"dtype": self.dtype})
        sizes = target.model_dump(include={"dtype", "device", "max_model_len", "max_num_seqs"})
        drafter = drafter_from_flag(self.draft, kind_of=kind_of, placement="in_process", **sizes)
        number = {"num_speculative_tokens": self.num_speculative_tokens or 0}
        return DrafthouseConfig(
            name=target.model,
            target=target,
            drafter=drafter,
            speculation=speculation.model_copy(update=number),
        )


class Lane:
    """An engine at work, and what decides for it. One lane of a lab is given requests at a time."""

    def __init__(
        self, engine: Engine, policy: Policy, clock: "Clock", registry: CollectorRegistry
    ) -> None:
        self.engine = engine
        self.policy = policy
        self._clock = clock
        self._registry = registry

    async def run(self, requests: Sequence[Request]) -> Wave:
        """All requests at once, and where the time went."""
        before = self._spent()
        start = time.perf_counter()
        streams = await run_together(self.engine, requests)
        seconds = time.perf_counter() - start
        spent = self._spent() - before
        return Wave(tuple(streams), seconds, spent + Spent(rest=seconds - spent.seconds))

    def _spent(self) -> Spent:
        """Since the lane began, all but the rest."""
        seconds = self._clock.seconds
        return Spent(
            num_steps=self.engine.load().step_id,
            draft=_sum_of(self._registry, "drafthouse_step_seconds_sum", phase="draft"),
            forward=seconds["forward"],
            sample=seconds["step"] - seconds["forward"],
        )


class Lab:
    """Builds lanes of one target; the weights of a number format are loaded once.

    All lanes compute in one thread, draft models too: every thread that computes has OpenMP
    threads of its own, and with more of them than cores every step pays for waking them.
    """

    def __init__(self, target: TargetConfig) -> None:
        self.folder = resolve(target.model)
        self.target = target
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="target")
        self._decoders: dict[DType, tuple[Decoder, Clock]] = {}
        self._points: dict[tuple[DType, int], Mapping[StepShape, float]] = {}

    async def call(self, compute: Callable[[], T]) -> T:
        """Run something in the computing thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)

    @asynccontextmanager
    async def lane(
        self,
        variant: Variant,
        speculation: SpeculationConfig | None = None,
        *,
        policy: Policy | None = None,
    ) -> AsyncIterator[Lane]:
        """An engine at work, ended on the way out. Raises ConfigurationError.

        It decides as the variant says, unless it is given another `policy`.
        """
        config = variant.config(self.target, speculation or SpeculationConfig())
        check_draft(config.drafter, target_folder=self.folder)
        worker, clock, drafter = await self.call(partial(self._build, config))
        policy = policy or FixedPolicy(variant.num_speculative_tokens or 0)
        if variant.controlled:
            policy = await self.call(partial(self._controller, config, worker))
        registry = CollectorRegistry()
        engine = stand_engine(
            config,
            target=_ThreadTarget(self.call, worker, clock),
            drafter=drafter,
            spec=load_spec(self.folder),
            eos_token_ids=load_generation_defaults(self.folder).eos_token_ids,
            registry=registry,
            policy=policy,
        )
        loop = asyncio.create_task(engine.run())
        try:
            yield Lane(engine, policy, clock, registry)
        finally:
            await engine.close()
            await asyncio.to_thread(close_drafter, drafter)
            await loop

    async def cost_table(self, variant: Variant) -> CostTable:
        """What the target's steps cost here, up to the variant's K."""
        config = variant.config(self.target, SpeculationConfig())
        return await self.call(partial(self._measured, config))

    def close(self) -> None:
        """End the computing thread."""
        self._thread.shutdown()

    def _measured(self, config: DrafthouseConfig) -> CostTable:
        worker, _ = self._build_worker(config)
        return self._cost(config, worker)

    def _build(self, config: DrafthouseConfig) -> tuple[TargetWorker, "Clock", Drafter]:
        worker, clock = self._build_worker(config)
        return worker, clock, self._drafter(config, worker)

    def _build_worker(self, config: DrafthouseConfig) -> tuple[TargetWorker, "Clock"]:
        use_threads(config.target.num_threads)
        dtype = config.target.dtype
        if dtype not in self._decoders:
            decoder = load_decoder(self.folder, dtype=dtype, device=config.target.device)
            self._decoders[dtype] = (decoder, Clock())
        decoder, clock = self._decoders[dtype]
        # It has all a decoder has, and the clock beside two of its methods.
        clocked = cast("Decoder", _ClockedDecoder(decoder, clock))
        return build_target_worker(config.target, self.folder, decoder=clocked), clock

    def _controller(self, config: DrafthouseConfig, worker: TargetWorker) -> Policy:
        """A controller that knows what steps cost here."""
        return AdaptivePolicy(
            self._cost(config, worker),
            num_speculative_tokens=config.speculation.num_speculative_tokens,
            trims=Rule(config.speculation.verification) is Rule.COUPLED,
        )

    def _cost(self, config: DrafthouseConfig, worker: TargetWorker) -> CostTable:
        """What steps cost here; it is measured once for all that ask."""
        dtype, most = config.target.dtype, config.speculation.num_speculative_tokens
        if (dtype, most) not in self._points:
            self._points[dtype, most] = measure_points(
                worker,
                max_num_seqs=config.target.max_num_seqs,
                max_num_speculative_tokens=most,
                max_model_len=config.target.max_model_len,
                budget_seconds=PROFILE_SECONDS,
            )
        return CostTable(self._points[dtype, most])

    def _drafter(self, config: DrafthouseConfig, worker: TargetWorker) -> Drafter:
        def build_model(model: ModelDrafterConfig) -> ModelDrafter:
            return ModelDrafter(
                _InThread(build_draft_model(model, vocab_size=worker.vocab_size), self._thread),
                name=model.model,
                rule=Rule(config.speculation.verification),
            )

        def build_beside(drafter: BesideConfig) -> Drafter:
            return build_beside_target(config, drafter, worker=worker, thread=self._thread)

        return build_drafter(config, build_model, build_beside)


@asynccontextmanager
async def open_lab(target: TargetConfig) -> AsyncIterator[Lab]:
    """A lab, ended on the way out."""
    lab = Lab(target)
    try:
        yield lab
    finally:
        lab.close()


class Clock:
    """Seconds by part, of one thread."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds the block takes to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start  # type: ignore[assignment]


class _ThreadTarget:
    """A worker behind the `Target` protocol, computing where the lab computes."""

    def __init__(
        self,
        call: Callable[[Callable[[], StepOutput]], Any],
        worker: TargetWorker,
        clock: Clock,
    ) -> None:
        self._call = call
        self._worker = worker
        self._clock = clock

    async def step(self, step: StepInput) -> StepOutput:
        """Compute, draw and verify off the event loop."""

        def compute() -> StepOutput:
            with self._clock.timed("step"):
                return self._worker.step(step)

        output: StepOutput = await self._call(compute)
        return output


class _ClockedDecoder:
    """A decoder with a clock beside its forward pass and its head; all else is its own."""

    def __init__(self, decoder: Decoder, clock: Clock) -> None:
        self._decoder = decoder
        self._clock = clock

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the decoder has
        return getattr(self._decoder, name)

    def forward(self, *arguments: Any) -> Tensor:  # noqa: ANN401 - the decoder's own
        """The decoder's, timed."""
        return self._timed(self._decoder.forward, *arguments)

    def logits(self, *arguments: Any) -> Tensor:  # noqa: ANN401 - the decoder's own
        """The decoder's, timed."""
        return self._timed(self._decoder.logits, *arguments)

    def largest(self, *arguments: Any) -> list[int] | None:  # noqa: ANN401 - the decoder's own
        """The decoder's, timed; what it returns has been waited for."""
        with self._clock.timed("forward"):
            return self._decoder.largest(*arguments)

    def _timed(self, compute: Callable[..., Tensor], *arguments: Any) -> Tensor:  # noqa: ANN401
        with self._clock.timed("forward"):
            result = compute(*arguments)
            if result.is_cuda:
                torch.cuda.synchronize()  # else the time would be that of asking for it
            return result


class _InThread:
    """A draft model that is used from another thread and computes in the lab's."""

    def __init__(self, draft_model: DraftModel, thread: ThreadPoolExecutor) -> None:
        self._draft_model = draft_model
        self._thread = thread

    @property
    def context_limit(self) -> int:
        """The draft model's."""
        return self._draft_model.context_limit

    def exchange(self, message: ExchangeInput) -> ExchangeOutput:
        """The draft model's."""
        return self._thread.submit(self._draft_model.exchange, message).result()

    def advance(self) -> bool:
        """The draft model's."""
        return self._thread.submit(self._draft_model.advance).result()


def _sum_of(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of all samples of that name with those labels among others."""
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
