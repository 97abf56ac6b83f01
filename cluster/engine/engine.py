"""The engine: schedule, propose, step, commit, for as long as there is work."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping

from cluster.control.policy import Policy
from cluster.engine.limits import EngineLimits
from cluster.engine.plan import Plan, Turn
from cluster.engine.proposer import Proposer, is_cancelled
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Emit, Sequence
from cluster.engine.validation import validate
from cluster.errors import InvalidRequest, Overloaded, TargetUnavailable
from cluster.interfaces import Drafter, Target
from cluster.messages import Draft, EngineLoad, SequenceTokens, StepOutput, TokenDelta
from cluster.metrics import EngineMetrics
from cluster.request import FinishReason, Request

__all__ = ["Engine", "EngineLimits"]

logger = logging.getLogger(__name__)


class Engine:
    """Continues requests with a target, faster with a drafter. Used from one event loop.

    Each request gets TokenDeltas through its `emit`, in order, the last with a finish reason.
    `emit` is called while a step is committed: it must not block.
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
    ) -> None:
        self._target = target
        self._policy = policy
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._scheduler = Scheduler(limits, draft_context_limit=drafter.context_limit)
        self._proposer = Proposer(
            drafter,
            deadline_seconds=limits.draft_deadline_seconds,
            vocab_size=limits.vocab_size,
            metrics=metrics,
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_submitted = 0
        self._in_step: frozenset[Sequence] = frozenset()
        self._leaving: list[Sequence] = []  # ended, but a step in flight uses their memory
        self._work = asyncio.Event()
        self._ended: TargetUnavailable | None = None

    def submit(self, request: Request, emit: Emit) -> None:
        """Take a request in; its deltas go to `emit` from the next step on.

        A request whose earlier output already ended it gets its last delta at once. Raises
        InvalidRequest, ContextExceeded, Overloaded, and TargetUnavailable once the engine ended.
        """
        if self._ended is not None:
            raise TargetUnavailable(str(self._ended))
        validate(request, self._limits)
        if request.request_id in self._sequences:
            raise InvalidRequest("request_id", f"{request.request_id!r} is under way already")
        num_queued = self._scheduler.num_queued
        if num_queued >= self._limits.max_num_waiting:
            raise Overloaded(waiting=num_queued, limit=self._limits.max_num_waiting)
        self._num_submitted += 1
        sequence = Sequence(
            request,
            seq_id=self._num_submitted,
            emit=emit,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._limits.max_model_len,
        )
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        if (reason := sequence.finish_reason()) is not None:
            self._end(sequence, TokenDelta(request_id=request.request_id, finish_reason=reason))
        self._work.set()
        self._metrics.observe_load(self.load())

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
        """How busy the engine is now."""
        return EngineLoad(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_blocks=self._scheduler.blocks.num_free,
            step_id=self._scheduler.step_id,
        )

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
        """One turn of the loop, for when there is work."""
        plan = self._scheduler.schedule(self._policy)
        self._in_step = frozenset(turn.sequence for turn in plan.turns)
        drafts = await self._proposer.propose(plan.queries())
        with self._metrics.timed("target"):
            result = await self._target.step(plan.input(drafts))
        self._commit(plan, drafts, result)

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
        self._ended = TargetUnavailable(f"the target failed: {error!r}")
        return self._ended

    def _commit(self, plan: Plan, drafts: Mapping[int, Draft], result: StepOutput) -> None:
        """Make a step's result true: the only place where sequences get tokens."""
        answers = _matched(plan, drafts, result)
        self._leave_step()
        for limit in plan.draft_limits:
            self._metrics.draft_limited(limit)
        for turn in plan.turns:
            sequence = turn.sequence
            if self._sequences.get(sequence.request.request_id) is not sequence:
                continue  # ended while the step was in flight, or by another's emit
            sequence.num_computed_tokens += turn.num_rows
            if (answer := answers.get(sequence.seq_id)) is not None:
                draft = drafts.get(sequence.seq_id, Draft())
                self._advance(sequence, draft, answer)
        self._metrics.observe_load(self.load())

    def _advance(self, sequence: Sequence, draft: Draft, answer: SequenceTokens) -> None:
        """Add the accepted run up to its stop, give back what was rejected, and emit."""
        num_emitted = sequence.extend(answer.token_ids)
        sequence.num_computed_tokens += answer.num_accepted
        self._scheduler.blocks.truncate(sequence.seq_id, sequence.num_computed_tokens)
        delta = TokenDelta(
            request_id=sequence.request.request_id,
            token_ids=answer.token_ids[:num_emitted],
            logprobs=answer.logprobs[:num_emitted],
            num_drafted=len(draft.token_ids),
            num_accepted=min(answer.num_accepted, num_emitted),
            finish_reason=sequence.finish_reason(),
        )
        self._metrics.count(delta)
        if delta.finish_reason is not None:
            self._end(sequence, delta)
        elif not _emitted(sequence, delta):
            self.abort(sequence.request.request_id)

    def _end(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Forget a sequence and emit its last delta; a step in flight keeps its memory so far."""
        del self._sequences[sequence.request.request_id]
        if sequence in self._in_step:
            self._leaving.append(sequence)
        else:
            self._release(sequence)
        self._metrics.observe_load(self.load())
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
        self._proposer.release((sequence.seq_id,))


def _matched(
    plan: Plan, drafts: Mapping[int, Draft], result: StepOutput
) -> dict[int, SequenceTokens]:
    """The target's answers by sequence id. Raises TargetUnavailable if one does not fit."""
    asked = [turn for turn in plan.turns if turn.samples]
    if result.step_id != plan.step_id or len(result.sequences) != len(asked):
        raise TargetUnavailable(f"the answer to step {plan.step_id} is of another step")
    for turn, answer in zip(asked, result.sequences, strict=True):
        _check_fits(turn, drafts.get(turn.sequence.seq_id, Draft()), answer)
    return {answer.seq_id: answer for answer in result.sequences}


def _check_fits(turn: Turn, draft: Draft, answer: SequenceTokens) -> None:
    """Raises TargetUnavailable unless the answer continues the sequence from its draft."""
    num_accepted, num_tokens = answer.num_accepted, len(answer.token_ids)
    num_logprobs = num_tokens if turn.sequence.request.logprobs else 0
    if (
        answer.seq_id != turn.sequence.seq_id
        or num_tokens != num_accepted + 1
        or len(answer.logprobs) != num_logprobs
        or answer.token_ids[:num_accepted] != draft.token_ids[:num_accepted]
        or num_accepted > len(draft.token_ids)
    ):
        raise TargetUnavailable(
            f"the answer for sequence {turn.sequence.seq_id} does not follow from its rows"
        )


def _emitted(sequence: Sequence, delta: TokenDelta) -> bool:
    """Whether the request's `emit` took the delta."""
    try:
        sequence.emit(delta)
    except Exception:
        logger.exception("emit of request %s failed", sequence.request.request_id)
        return False
    return True
