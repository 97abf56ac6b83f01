"""The engine: schedule, propose, step, commit, for as long as there is work."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping

from cluster.control.policy import Policy, StepRecord, StepShape
from cluster.engine.commit import advance, matched, outcomes
from cluster.engine.deadlines import Deadlines
from cluster.engine.limits import EngineLimits
from cluster.engine.load import LoadMeter
from cluster.engine.plan import Plan, Turn
from cluster.engine.proposer import Proposer, is_cancelled
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Emit, Sequence
from cluster.engine.trace import StepTracer
from cluster.engine.validation import validate
from cluster.errors import DrafthouseError, InvalidRequest, Overloaded, TargetUnavailable
from cluster.interfaces import Drafter, Target
from cluster.messages import NO_DRAFT, Draft, EngineLoad, Rule, SequenceTokens, TokenDelta
from cluster.metrics import EngineMetrics
from cluster.request import DEADLINE_PASSED, FinishReason, Request

__all__ = ["Engine", "EngineLimits"]

logger = logging.getLogger(__name__)

LEAST_RETRY_SECONDS = 0.1


class Engine:
    """Continues requests with a target, faster with a drafter. Used from one event loop.

    Each request gets TokenDeltas through its `emit`, in order, the last with a finish reason.
    `emit` is called while a step is committed: it must not block. `rule` says how drafts are
    verified, and should be the drafter's, too: what it draws otherwise is kept less often.
    """

    def __init__(
        self,
        *,
        target: Target,
        drafter: Drafter,
        policy: Policy,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        metrics: EngineMetrics,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        self._target = target
        self._rule = rule
        self._policy = policy
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._scheduler = Scheduler(limits, draft_context_limit=drafter.context_limit)
        self._deadlines = Deadlines()
        self._tracer = StepTracer()
        self._proposer = Proposer(
            drafter,
            deadline_seconds=limits.draft_deadline_seconds,
            vocab_size=limits.vocab_size,
            metrics=metrics,
            rule=rule,
        )
        self._meter = LoadMeter(
            self._scheduler, limits, policy, late_ratio=lambda: self._proposer.late_ratio
        )
        metrics.watch_load(self._meter.counts, num_blocks=limits.num_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._num_submitted = 0
        self._in_step: frozenset[Sequence] = frozenset()
        self._leaving: list[Sequence] = []  # ended, but a step in flight uses their memory
        self._work = asyncio.Event()
        self._ended: TargetUnavailable | None = None

    def submit(self, request: Request, emit: Emit) -> None:
        """Take a request in; its deltas go to `emit` from the next step on.

        A request whose earlier output already ended it gets its last delta at once, and one that
        had begun elsewhere is taken in however many wait. Raises
        InvalidRequest, ContextExceeded, Overloaded, and TargetUnavailable once the engine ended.
        """
        if self._ended is not None:
            raise TargetUnavailable(str(self._ended))
        validate(request, self._limits)
        if request.request_id in self._sequences:
            raise InvalidRequest("request_id", f"{request.request_id!r} is under way already")
        num_queued = self._scheduler.num_queued
        if num_queued >= self._limits.max_num_waiting and not request.output_token_ids:
            raise Overloaded(
                waiting=num_queued,
                limit=self._limits.max_num_waiting,
                retry_seconds=max(self._meter.place_seconds, LEAST_RETRY_SECONDS),
            )
        self._num_submitted += 1
        sequence = Sequence(
            request,
            seq_id=self._num_submitted,
            emit=emit,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._limits.max_model_len,
            arrived_at=time.monotonic(),
        )
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        if (reason := sequence.finish_reason()) is not None:
            self._end(sequence, TokenDelta(request_id=request.request_id, finish_reason=reason))
        self._work.set()

    def abort(self, request_id: str) -> None:
        """End a request with FinishReason.ABORT. An id that is not under way is ignored.

        Its last delta goes out at once; what a step in flight still brings it is dropped, and
        its memory is free again after that step.
        """
        if (sequence := self._sequences.get(request_id)) is not None:
            self._end(sequence, TokenDelta(request_id=request_id, finish_reason=FinishReason.ABORT))

    async def generate(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to the one with a finish reason. Closing it aborts.

        Raises what `submit` raises, at the first item.
        """
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self.submit(request, deltas.put_nowait)
        finished = False
        try:
            while not finished:
                delta = await deltas.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self.abort(request.request_id)

    def load(self) -> EngineLoad:
        """How busy the engine is now, and how fast."""
        return self._meter.load()

    def prefixes(self) -> frozenset[int]:
        """Digests of the prefixes that need not be computed; the same object until they change."""
        return self._meter.prefixes()

    def set_price_floor(self, floor: float) -> None:
        """Verify no draft position of a survival below it, whatever the policy thinks."""
        self._policy.price_floor = floor

    async def run(self) -> None:
        """Step while there is work, sleep while there is none; until cancelled or closed.

        Afterwards the engine is over: what was under way has ended with FinishReason.ERROR.
        Raises TargetUnavailable when a step failed.
        """
        try:
            while self._ended is None:
                self._work.clear()
                if self._scheduler.has_work:
                    await self.step()
                else:
                    await self._work.wait()
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise self._failed(error) from error  # inside the target, not us
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._leave_step()
            await self.close()

    async def step(self) -> None:
        """One turn of the loop, for when there is work; what came too late is ended before."""
        self._end_expired()
        if not self._scheduler.has_work:
            return
        plan = self._scheduler.schedule(
            self._policy, urgency=self._deadlines.urgency, prompt_rows=self._meter.prompt_rows
        )
        self._observe(plan)
        self._in_step = frozenset(turn.sequence for turn in plan.turns)
        begin = time.perf_counter()
        shape = plan.shape
        drafts = await self._drafts(plan, shape)
        middle = time.perf_counter()
        # Once the target is at work: the policy learns from the step before this one.
        asyncio.get_running_loop().call_soon(self._policy.learn)
        with self._metrics.timed("target"):
            result = await self._target.step(plan.input(drafts, rule=self._rule))
        target_seconds = time.perf_counter() - middle
        draft_seconds = middle - begin
        self._tracer.ended(plan, draft_seconds=draft_seconds, target_seconds=target_seconds)
        answers = matched(plan, drafts, result)
        self._policy.observe(
            StepRecord(
                shape=shape,
                outcomes=outcomes(drafts, answers),
                draft_seconds=draft_seconds,
                target_seconds=target_seconds,
            )
        )
        self._deadlines.observe(draft_seconds + target_seconds)
        self._meter.observe_step(
            num_rows=plan.cost(self._limits),
            drafts=drafts.values(),
            answers=answers,
            seconds=draft_seconds + target_seconds,
            decodes=plan.decodes,
        )
        self._commit(plan, drafts, answers)

    async def _drafts(self, plan: Plan, shape: StepShape) -> dict[int, Draft]:
        """What is drafted and worth verifying.

        Under Rule.RATIO all of it is: which positions pay is decided by looking at a whole draft,
        and to end it before a token for what comes after that token would shift the output.
        """
        drafts = await self._proposer.propose(
            plan.queries(), patience_seconds=self._policy.patience_seconds
        )
        if self._rule is Rule.RATIO:
            return drafts
        admitted = self._policy.admit(drafts, shape)
        return {seq_id: draft.first(admitted.get(seq_id, 0)) for seq_id, draft in drafts.items()}

    def _observe(self, plan: Plan) -> None:
        """Count who was let in and who was put back."""
        now = time.monotonic()
        for sequence in plan.admitted:
            self._metrics.admitted(
                waited_seconds=now - sequence.arrived_at,
                num_prompt_tokens=len(sequence.request.prompt_token_ids),
                num_cached_tokens=sequence.num_cached_tokens or 0,
            )
        self._metrics.preempted(plan.num_preempted)

    async def close(self) -> None:
        """End everything under way with FinishReason.ERROR; `run` returns after its step."""
        if self._ended is None:
            self._ended = TargetUnavailable("the engine is closed")
        self._work.set()
        for request_id, sequence in list(self._sequences.items()):
            self._end(
                sequence,
                TokenDelta(
                    request_id=request_id,
                    finish_reason=FinishReason.ERROR,
                    error=str(self._ended),
                ),
            )

    def _failed(self, error: BaseException) -> TargetUnavailable:
        """Note why the engine ends."""
        logger.error("step %d failed", self._scheduler.step_id, exc_info=error)
        # Callers hear of it, and what others raise may tell of files and texts.
        why = error if isinstance(error, DrafthouseError) else type(error).__name__
        self._ended = TargetUnavailable(f"the target failed: {why}")
        return self._ended

    def _commit(
        self, plan: Plan, drafts: Mapping[int, Draft], answers: Mapping[int, SequenceTokens]
    ) -> None:
        """Make a step's answers true: the only place where sequences get tokens."""
        self._leave_step()
        for limit in plan.draft_limits:
            self._metrics.draft_limited(limit)
        told: list[tuple[str, TokenDelta]] = []
        for turn in plan.turns:
            sequence = turn.sequence
            if self._sequences.get(sequence.request.request_id) is not sequence:
                continue  # ended while the step was in flight, or by another's emit
            draft = drafts.get(sequence.seq_id, NO_DRAFT)
            delta = self._commit_turn(turn, draft, answers.get(sequence.seq_id))
            if delta is not None:
                told.append((draft.drafter, delta))
        self._metrics.count(told)

    def _commit_turn(
        self, turn: Turn, draft: Draft, answer: SequenceTokens | None
    ) -> TokenDelta | None:
        """Make one sequence's part of a step true; emits what tokens it brought, and returns it."""
        sequence = turn.sequence
        request_id = sequence.request.request_id
        if answer is not None and answer.error is not None:
            failed = TokenDelta(
                request_id=request_id, finish_reason=FinishReason.FAILED, error=answer.error
            )
            self._end(sequence, failed)
            return None
        if answer is not None:
            sequence.add_scores(answer.scores)
        sequence.num_computed_tokens += turn.num_rows
        if answer is None or not answer.token_ids:
            self._scheduler.settle(sequence)
            return None
        is_first = not sequence.has_begun
        delta = advance(sequence, draft, answer)
        delta = self._tracer.told(turn, draft, delta, is_first=is_first)
        self._scheduler.settle(sequence)
        self._scheduler.shares.charge(sequence.request.tenant, delta.num_drafted)
        if delta.finish_reason is not None:
            self._meter.observe_answer(sequence.num_answer_tokens)
            self._end(sequence, delta)
        elif not _emitted(sequence, delta):
            self.abort(request_id)
        return delta

    def _end_expired(self) -> None:
        """End those whose deadline has passed: they do not run any more, or never do."""
        for sequence in self._deadlines.expired(self._sequences.values()):
            self._metrics.expired(had_begun=sequence.has_begun)
            passed = TokenDelta(
                request_id=sequence.request.request_id,
                finish_reason=FinishReason.ABORT,
                error=DEADLINE_PASSED,
            )
            self._end(sequence, passed)

    def _end(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Forget a sequence and emit its last delta; a step in flight keeps its memory so far."""
        del self._sequences[sequence.request.request_id]
        if sequence in self._in_step:
            self._leaving.append(sequence)
        else:
            self._release(sequence)
        _emitted(sequence, delta)

    def _leave_step(self) -> None:
        """The step is over: release those that ended in it."""
        self._in_step = frozenset()
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back all a sequence holds, here and at the drafter."""
        self._scheduler.remove(sequence)
        self._policy.forget((sequence.seq_id,))
        self._proposer.release((sequence.seq_id,))


def _emitted(sequence: Sequence, delta: TokenDelta) -> bool:
    """Whether the request's `emit` took the delta."""
    try:
        sequence.emit(delta)
    except Exception:
        logger.exception("emit of request %s failed", sequence.request.request_id)
        return False
    return True
