"""`drafthouse rollout`: speculation for a share of the traffic first, and for all if it is better.

The prompts are replayed to a live server. First each is answered once without speculation: that is
what answers have to be. Then, share by share, a random part of the requests speculates while the
others do not, at the same time and under the same load; the two are compared, and what was shown
to be worse ends the rollout.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpc import StatusCode, aio
from rich.console import Group
from rich.table import Table

from cluster.errors import ConfigurationError, Unavailable
from cluster.tools.bench.progress import Report
from cluster.tools.bench.served import deltas
from cluster.tools.bench.streams import Stream
from cluster.tools.bench.workloads import Prompt
from cluster.tools.choosing.canary import TOLERANCE, Decision, Served, Stage, decide
from cluster.tools.choosing.resampling import CONFIDENCE, Interval
from cluster.tools.connection import Access, credentials
from protos import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What is asked of whom: of `num_requests` in each stage a share speculates."""

    address: str
    prompts: Sequence[Prompt]
    shares: Sequence[float] = (0.1, 0.5)
    num_requests: int = 100
    concurrency: int = 4
    max_tokens: int = 64
    temperature: float = 0.0
    max_drafts: int | None = None
    tolerance: float = TOLERANCE
    seed: int = 0
    access: Access = field(default_factory=Access)

    def assignment(self, share: float) -> list[bool]:
        """Which requests speculate: a random part, never none and never all.

        Raises ConfigurationError for a share or a number of requests that leaves no comparison.
        """
        if not 0 < share < 1:
            raise ConfigurationError(f"--share: {share:g} is not between 0 and 1")
        if self.num_requests < 2:  # noqa: PLR2004 - one of either kind
            raise ConfigurationError(f"--num-requests: {self.num_requests} leave none to compare")
        number = min(max(round(share * self.num_requests), 1), self.num_requests - 1)
        chosen = [place < number for place in range(self.num_requests)]
        random.Random(f"{self.seed} {share}").shuffle(chosen)
        return chosen


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Every stage there was, and what follows."""

    model: str
    stages: tuple[Stage, ...]
    num_shares: int

    @property
    def decision(self) -> Decision:
        """Promote only after the last share."""
        return decide(self.stages)

    def as_json(self) -> dict[str, object]:
        """Plain data; ratios of times under 1 are faster."""
        return {
            "model": self.model,
            "decision": self.decision,
            "confidence": CONFIDENCE,
            "stages": [_stage_json(stage) for stage in self.stages],
        }

    def __rich__(self) -> Group:
        title = f"Requests with speculation to those without, {CONFIDENCE:.0%} intervals"
        table = Table(title=title, title_justify="left")
        headings = ("share", "requests", "time between tokens", "first token", "throughput")
        for heading in (*headings, "kept", "other answers", "failed", "decision"):
            table.add_column(heading, justify="right")
        for stage in self.stages:
            rate = stage.acceptance_rate
            table.add_row(
                f"{stage.share:.0%}",
                f"{len(stage.canary)} of {len(stage.canary) + len(stage.control)}",
                *map(_shown, (stage.token_time, stage.first_token, stage.throughput)),
                "-" if rate is None else f"{rate:.0%}",
                f"{stage.divergence.value:.0%} (at most {stage.divergence.high:.0%})",
                f"{stage.failures[0].value:.0%}",
                stage.decision,
            )
        reasons = [f"- {reason}" for stage in self.stages for reason in stage.objections()]
        return Group(table, *reasons, f"{self.model}: {self._advice}")

    @property
    def _advice(self) -> str:
        match self.decision:
            case Decision.PROMOTE:
                return "promote: let all requests speculate."
            case Decision.RETURN:
                return "return: leave speculation off."
            case Decision.UNDECIDED:
                return "return, for now: the requests were too few to tell."


def _stage_json(stage: Stage) -> dict[str, object]:
    with_it, without = stage.failures
    return {
        "share": stage.share,
        "num_canary": len(stage.canary),
        "num_control": len(stage.control),
        "token_time_ratio": _interval_json(stage.token_time),
        "first_token_ratio": _interval_json(stage.first_token),
        "throughput_ratio": _interval_json(stage.throughput),
        "draft_acceptance_rate": stage.acceptance_rate,
        "must_be_same": stage.must_be_same,
        "divergence": _interval_json(stage.divergence),
        "divergence_without": _interval_json(stage.own_divergence),
        "failures": _interval_json(with_it),
        "failures_without": _interval_json(without),
        "objections": list(stage.objections()),
        "decision": stage.decision,
    }


def _interval_json(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"low": interval.low, "value": interval.value, "high": interval.high}


def _shown(interval: Interval | None) -> str:
    return (
        "-"
        if interval is None
        else f"{interval.value:.2f} ({interval.low:.2f}-{interval.high:.2f})"
    )


async def run_rollout(plan: RolloutPlan, *, report: Report) -> RolloutReport:
    """Ask, compare, and stop at the first share that is worse.

    Raises Unavailable when the server cannot be reached or does not answer without speculation,
    and ConfigurationError.
    """
    assignments = [plan.assignment(share) for share in plan.shares]
    shown = credentials(plan.address, plan.access)
    channel = (
        aio.insecure_channel(plan.address)
        if shown is None
        else aio.secure_channel(plan.address, shown)
    )
    async with channel:
        traffic = _Traffic(plan, inference_pb2_grpc.InferenceStub(channel), report)
        model, must_be_same = await traffic.model()
        reference = await traffic.reference()
        stages: list[Stage] = []
        for share, chosen in zip(plan.shares, assignments, strict=True):
            served = await traffic.served(f"share {share:.0%}", chosen)
            stages.append(
                Stage(
                    share,
                    canary=[each for each, speculates in served if speculates],
                    control=[each for each, speculates in served if not speculates],
                    reference=reference,
                    must_be_same=must_be_same,
                    tolerance=plan.tolerance,
                )
            )
            if stages[-1].decision is Decision.RETURN:
                break
    return RolloutReport(model, tuple(stages), len(plan.shares))


class _Traffic:
    """Replays the prompts, so many at once."""

    def __init__(
        self, plan: RolloutPlan, stub: inference_pb2_grpc.InferenceStub, report: Report
    ) -> None:
        self._plan = plan
        self._stub = stub
        self._report = report

    async def model(self) -> tuple[str, bool]:
        """What is served, and whether the seed alone decides its answers."""
        request = inference_pb2.GetModelRequest()
        try:
            model = await self._stub.GetModel(request, metadata=self._plan.access.metadata)
        except aio.AioRpcError as error:
            raise Unavailable(f"{self._plan.address}: {_reason(error)}") from error
        coupled = model.verification == inference_pb2.VERIFICATION_COUPLED
        return model.name, bool(model.bit_exact and (coupled or not self._plan.temperature))

    async def reference(self) -> dict[int, tuple[int, ...]]:
        """Every prompt's answer without speculation."""
        served = await self.served("without speculation", [False] * len(self._plan.prompts))
        for each, _ in served:
            if each.error is not None:
                raise Unavailable(f"without speculation: {each.error}")
        return {each.prompt: each.token_ids for each, _ in served}

    async def served(self, what: str, speculates: Sequence[bool]) -> list[tuple[Served, bool]]:
        """One request for each, to the prompts in turn."""
        self._report(what, 0, len(speculates))
        gate, num_done = asyncio.Semaphore(self._plan.concurrency), 0

        async def ask(number: int, *, speculates: bool) -> tuple[Served, bool]:
            nonlocal num_done
            async with gate:
                served = await self._served(number % len(self._plan.prompts), speculates=speculates)
            num_done += 1
            self._report(what, num_done, total)
            return served, speculates

        total = len(speculates)
        numbered = enumerate(speculates)
        return list(await asyncio.gather(*(ask(at, speculates=each) for at, each in numbered)))

    async def _served(self, prompt: int, *, speculates: bool) -> Served:
        start = time.perf_counter()
        stream = Stream(start)
        message = self._message(prompt, speculates=speculates)
        try:
            await stream.follow(deltas(self._stub, message, self._plan.access.metadata))
        except aio.AioRpcError as error:
            return Served(prompt=prompt, error=_reason(error))
        if not stream.arrivals:
            return Served(prompt=prompt, error="an answer without a token")
        return Served(
            prompt=prompt,
            token_ids=tuple(stream.token_ids),
            first_token_seconds=stream.first_token_seconds,
            seconds=stream.arrivals[-1].seconds - start,
            num_drafted=stream.num_drafted,
            num_accepted=stream.num_accepted,
        )

    def _message(self, prompt: int, *, speculates: bool) -> inference_pb2.GenerateRequest:
        plan, said = self._plan, self._plan.prompts[prompt]
        message = inference_pb2.GenerateRequest(
            sampling=inference_pb2.Sampling(temperature=plan.temperature, seed=prompt),
            stopping=inference_pb2.Stopping(max_tokens=plan.max_tokens),
            speculation=inference_pb2.Speculation(
                enabled=speculates, max_tokens=plan.max_drafts if speculates else None
            ),
        )
        if isinstance(said, str):
            message.prompt = said
        else:
            message.messages.extend(
                inference_pb2.Message(role=each.role, content=each.content) for each in said
            )
        return message


def _reason(error: aio.AioRpcError) -> str:
    code: StatusCode = error.code()
    return f"{code.name}: {error.details()}"
