"""A target that several ranks hold together, behind the protocol an engine knows.

Every step is one call to each rank, all with the same packed input; rank 0's answer is awaited,
and the others are only watched. The first rank that dies or fails takes the group with it: the
ranks are killed, and every step from then on raises TargetUnavailable with the first error.
"""

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors.placement import actor_options
from cluster.actors.rank import RankActor
from cluster.config import DrafthouseConfig
from cluster.errors import DrafthouseError, TargetUnavailable
from cluster.messages import StepInput, StepOutput
from cluster.processor import Processor

if TYPE_CHECKING:
    from cluster.local import ComputeSide
    from cluster.rank import RankInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_BUNDLE = 2  # of the replica's placement group: after the supervisor's and the engine's
INLINE_BYTES = 100_000  # above that an argument goes into the object store, once for all
LOOK_AROUND_SECONDS = 0.2  # what a rank says of another may arrive before the other's death


class RankGroup:
    """Ranks that have joined, as a `Target`. Used from one event loop."""

    def __init__(self, ranks: Sequence[ActorHandle], info: "RankInfo") -> None:
        self.info = info
        self._ranks = tuple(ranks)
        self._loop = asyncio.get_running_loop()
        self._errors: dict[int, BaseException] = {}
        self._ended: asyncio.Future[str] = self._loop.create_future()
        for number, rank in enumerate(self._ranks):
            self._watch(number, rank.outlive.remote())

    async def step(self, step: StepInput) -> StepOutput:
        """Compute on all ranks, sample and verify on rank 0. Raises TargetUnavailable."""
        packed: Any = pickle.dumps(step)
        if len(packed) > INLINE_BYTES:
            packed = ray.put(packed)
        output: StepOutput = await self._answer(lambda rank: rank.step.remote(packed))
        return output

    async def write_noise(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Have keys and values at the first positions. Raises TargetUnavailable."""
        await self._answer(lambda rank: rank.write_noise.remote(block_table, num_tokens))

    async def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit on any rank. Raises TargetUnavailable."""
        calls = [self._watch(*each) for each in self._call(lambda rank: rank.self_check.remote())]
        names = [name for call in calls for name in await self._or_ended(call)]
        return tuple(dict.fromkeys(names))

    async def computed_seconds(self) -> float:
        """What the last step took on rank 0, by itself. Raises TargetUnavailable."""
        call = self._watch(0, self._ranks[0].computed_seconds.remote())
        return float(await self._or_ended(call))

    def close(self) -> None:
        """End the ranks. May be called again."""
        self._end("the target is closed")

    async def _answer(self, call: Callable[[ActorHandle], Awaitable[Any]]) -> Any:  # noqa: ANN401 - of any call
        """Call all ranks, and return what rank 0 says."""
        leader, *_ = [self._watch(*each) for each in self._call(call)]
        return await self._or_ended(leader)

    def _call(
        self, call: Callable[[ActorHandle], Awaitable[Any]]
    ) -> list[tuple[int, Awaitable[Any]]]:
        if self._ended.done():
            raise TargetUnavailable(self._ended.result())
        return [(number, call(rank)) for number, rank in enumerate(self._ranks)]

    async def _or_ended(self, answer: "asyncio.Future[T]") -> T:
        """The answer; or the end of the group, if that comes first. Raises TargetUnavailable."""
        await asyncio.wait((answer, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and answer.exception() is None:
            return answer.result()
        raise TargetUnavailable(await asyncio.shield(self._ended))

    def _watch(self, number: int, call: Awaitable[T]) -> "asyncio.Future[T]":
        """Hear of a call that fails, even if nobody awaits it."""

        def done(answer: "asyncio.Future[T]") -> None:
            error = None if answer.cancelled() else answer.exception()
            if error is not None and not self._ended.done():
                self._failed(number, error)

        answer = asyncio.ensure_future(call)
        answer.add_done_callback(done)
        return answer

    def _failed(self, number: int, error: BaseException) -> None:
        """Note what a rank raised; a moment later, when the others had their say, end the group."""
        if not self._errors:
            self._loop.call_later(LOOK_AROUND_SECONDS, self._end_for_a_reason)
        self._errors.setdefault(number, error)

    def _end_for_a_reason(self) -> None:
        """A death explains what others say of it, and so does any error but theirs."""
        number, error = min(self._errors.items(), key=lambda item: _rank_of_cause(item[1]))
        died = isinstance(error, RayActorError)  # then the trace is Ray's, and says nothing more
        reason = "died" if died else f"failed: {_cause(error)!r}"
        logger.error("rank %d %s", number, reason, exc_info=None if died else error)
        self._end(f"rank {number} of {len(self._ranks)} {reason}")

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
            for rank in self._ranks:
                ray.kill(rank)


@dataclass(frozen=True, slots=True)
class _Cache:
    """The group's KV memory, for a thread that may wait."""

    num_blocks: int
    block_size: int
    group: "WaitingGroup"

    def write_noise(self, block_table: Sequence[int], num_tokens: int) -> None:
        """Have keys and values at the first positions."""
        self.group.wait(self.group.ranks.write_noise(block_table, num_tokens))


class WaitingGroup:
    """A group for a thread beside its event loop: the engine's, while it is built."""

    def __init__(self, ranks: RankGroup, loop: asyncio.AbstractEventLoop) -> None:
        self.ranks = ranks
        self._loop = loop

    @classmethod
    def of(cls, ranks: RankGroup) -> Self:
        """For a group of the running loop."""
        return cls(ranks, asyncio.get_running_loop())

    @property
    def vocab_size(self) -> int:
        """Entries of a row of logits."""
        return self.ranks.info.vocab_size

    @property
    def processor(self) -> Processor:
        """What computes."""
        return self.ranks.info.processor

    @property
    def cache(self) -> _Cache:
        """The KV memory, whose parts the ranks have."""
        return _Cache(self.ranks.info.num_blocks, self.ranks.info.block_size, self)

    def step(self, step: StepInput) -> StepOutput:
        """Compute a step."""
        return self.wait(self.ranks.step(step))

    def self_check(self) -> tuple[str, ...]:
        """The schedules whose results differ in some bit on any rank."""
        return self.wait(self.ranks.self_check())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Have the loop run it, and return what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def compute_side(config: DrafthouseConfig, *, engine_id: str) -> "ComputeSide":
    """The ranks of this replica, in the bundles of its placement group, ready to step.

    They belong to the calling process and die with it. Raises ConfigurationError, or
    TargetUnavailable when a rank died meanwhile.
    """
    from cluster.local import ComputeSide  # noqa: PLC0415 - the engine's process has torch anyway

    group = await start_ranks(
        config, name=engine_id, placement=ray.util.get_current_placement_group()
    )
    return ComputeSide(group, WaitingGroup.of(group))


async def start_ranks(
    config: DrafthouseConfig, *, name: str, placement: PlacementGroup | None = None
) -> RankGroup:
    """Start the ranks, have them meet and load. Without `placement` they are wherever they fit.

    `name` is how their logs begin. Raises ConfigurationError, TargetUnavailable.
    """
    ranks = [
        _start_rank(config, number, name, placement)
        for number in range(config.target.tensor_parallel_size)
    ]
    try:
        return await _joined(ranks)
    except BaseException:
        for rank in ranks:
            ray.kill(rank)
        raise


def _start_rank(
    config: DrafthouseConfig, number: int, name: str, placement: PlacementGroup | None
) -> ActorHandle:
    where: dict[str, Any] = {}
    if placement is not None:
        where["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement, placement_group_bundle_index=FIRST_BUNDLE + number
        )
    options = actor_options(config.target.resources)
    # With a group of its own for `outlive`, all other calls share one thread: OpenMP's too.
    actor = ray.remote(**options, **where, max_restarts=0, concurrency_groups={"watch": 1})
    return actor(RankActor).remote(config, number, name=f"{name}-rank-{number}")


async def _joined(ranks: Sequence[ActorHandle]) -> RankGroup:
    from cluster.rank import Meeting  # noqa: PLC0415 - as above

    nodes = await _all(rank.prepare.remote() for rank in ranks)
    [(host, port)] = await _all([ranks[0].open_store.remote()])
    num_ranks_on = Counter(nodes)
    infos = await _all(
        rank.join.remote(Meeting(host=host, port=port, num_ranks_here=num_ranks_on[node]))
        for rank, node in zip(ranks, nodes, strict=True)
    )
    return RankGroup(ranks, infos[0])


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What every rank says, in order. Raises ConfigurationError or TargetUnavailable."""
    try:
        return list(await asyncio.gather(*calls))
    except (RayActorError, RayTaskError) as error:
        cause = _cause(error)
        if isinstance(cause, DrafthouseError):
            raise cause from None
        raise TargetUnavailable(f"a rank did not start: {cause!r}") from error


def _cause(error: BaseException) -> BaseException:
    """What a rank raised there."""
    return error.cause if isinstance(error, RayTaskError) else error


def _rank_of_cause(error: BaseException) -> int:
    """How near an error is to the beginning of it all: 0 is nearest."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if isinstance(_cause(error), TargetUnavailable) else 1
