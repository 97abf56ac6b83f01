"""Fault after fault, each when the cluster is whole again, under streams that never pause."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.tools.bench.progress import Report, silent
from cluster.tools.drill.faults import LAST, Fault, Planner
from cluster.tools.drill.fleet import Fleet
from cluster.tools.drill.record import DrillOutcome, Record
from cluster.tools.drill.streams import Streams

RECOVERY_SECONDS = 240.0
SETTLE_SECONDS = 1.0  # between the last recovery and the next fault
LAST_SECONDS = 10.0  # that streams have to go on without the head
POLL_SECONDS = 0.25
MIDDLE_SECONDS = 5.0
GLANCE_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """What to do. `last` says whether the head goes in the end; `seconds` is when to stop."""

    kinds: Sequence[Fault]
    num_faults: int
    seed: int = 0
    seconds: float = float("inf")
    recovery_seconds: float = RECOVERY_SECONDS
    settle_seconds: float = SETTLE_SECONDS
    last_seconds: float = LAST_SECONDS

    @property
    def ends_with_head(self) -> bool:
        """Whether the head node goes in the end."""
        return LAST in self.kinds


class Drill:
    """Runs a plan against a fleet that serves some streams."""

    def __init__(
        self,
        plan: DrillPlan,
        fleet: Fleet,
        streams: Streams,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Report = silent,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._streams = streams
        self._clock = clock
        self._report = report
        self._records: list[Record] = []

    async def run(self) -> DrillOutcome:
        """Inject all faults, one by one; the streams have ended when this returns."""
        start = self._clock()
        running = asyncio.create_task(self._streams.run())
        try:
            await self._all_in_flight(running)
            await self._faults(start)
        finally:
            self._streams.end()
            await running
        counts = self._streams.counts
        return DrillOutcome(
            records=tuple(self._records),
            num_streams=len(self._streams.lanes),
            seconds=self._clock() - start,
            counts=counts,
            messages=tuple(self._streams.messages),
        )

    async def _faults(self, start: float) -> None:
        planner = Planner(self._plan.kinds, seed=self._plan.seed)
        several = self._plan.num_faults - self._plan.ends_with_head
        for number in range(several):
            if self._clock() - start > self._plan.seconds:
                break
            fault, victim = planner.draw(await asyncio.to_thread(self._fleet.census))
            self._report("faults", number, self._plan.num_faults)
            if (await self._fault(fault, victim)).whole_seconds is None:
                return
        if self._plan.ends_with_head:
            await self._fault(LAST, 0)

    async def _fault(self, fault: Fault, victim: int) -> Record:
        await self._in_the_middle()
        before = self._streams.counts.copy()
        num_in_flight = self._streams.num_in_flight
        self._streams.mark()
        at = self._clock()
        await asyncio.to_thread(self._fleet.inject, fault, victim)
        if fault is LAST:
            await asyncio.sleep(self._plan.last_seconds)
            missing = None
        else:
            missing = await self._whole(at)
        whole_seconds = None if missing or fault is LAST else self._clock() - at
        silent_lanes = not await self._moved_on(at)
        await asyncio.sleep(self._plan.settle_seconds)
        record = Record(
            name=fault.name,
            num_in_flight=num_in_flight,
            counts=self._streams.counts.since(before),
            pause_seconds=max(lane.pause_until_now for lane in self._streams.lanes),
            whole_seconds=None if silent_lanes else whole_seconds,
            missing="a stream waits for its next token" if silent_lanes else missing,
        )
        self._records.append(record)
        return record

    async def _whole(self, at: float) -> str | None:
        """Wait for everything to be back; what is missing when it is not, after a long time."""
        while (missing := await asyncio.to_thread(self._fleet.missing)) is not None:
            if self._clock() - at > self._plan.recovery_seconds:
                return missing
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def _moved_on(self, at: float) -> bool:
        """Wait for a token on every stream; whether all had one."""
        while not all(lane.moved_on for lane in self._streams.lanes):
            if self._clock() - at > self._plan.recovery_seconds:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _in_the_middle(self) -> None:
        """Wait for a moment at which no stream is between two answers; not for ever."""
        end = self._clock() + MIDDLE_SECONDS
        streams = self._streams
        while streams.num_in_flight < len(streams.lanes) and self._clock() < end:  # noqa: ASYNC110 - of many
            await asyncio.sleep(GLANCE_SECONDS)

    async def _all_in_flight(self, running: "asyncio.Task[None]") -> None:
        self._streams.mark()
        while not all(lane.moved_on for lane in self._streams.lanes):
            if running.done():
                await running
            await asyncio.sleep(POLL_SECONDS)
