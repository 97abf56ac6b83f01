"""A mixed load over its capacity for a long time, and everything back where it began."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import DrafthouseConfig
from cluster.tools.bench.progress import Report, silent
from cluster.tools.drill.faults import LAST, Fault, Planner
from cluster.tools.drill.leaks import Rest, Samples, leaks, rest_of
from cluster.tools.drill.local_fleet import LocalFleet
from cluster.tools.drill.mix import Mix
from cluster.tools.drill.open_load import OpenLoad, measure_capacity
from cluster.tools.drill.questions import make_questions, undisturbed
from cluster.tools.drill.run import RECOVERY_SECONDS
from cluster.tools.drill.session import Sizes, clients_of, fleet_of
from cluster.tools.drill.soak_record import SoakOutcome

NUM_QUESTIONS = 16
CAPACITY_SECONDS = 10.0
SAMPLE_SECONDS = 2.0  # looking at every process of the machine takes a while itself
REST_SECONDS = 90.0  # after which nothing may be held any more; what dead engines left neither
POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """What to do: `load` times what the cluster can serve, and so many faults on the way."""

    seconds: float
    load: float = 1.5
    kinds: Sequence[Fault] = ()
    num_faults: int = 0
    seed: int = 0


async def run_soak(
    config: DrafthouseConfig, plan: SoakPlan, sizes: Sizes, *, report: Report = silent
) -> SoakOutcome:
    """Serve the configuration on nodes of this machine, and go through with the plan."""
    questions = make_questions(NUM_QUESTIONS, max_tokens=sizes.max_tokens)
    answers = await undisturbed(config, questions)
    async with fleet_of(config, sizes) as fleet, clients_of(fleet) as gateways:
        num_lanes = sizes.num_targets * fleet.num_seqs
        mix = Mix(questions, answers, answer_seconds=1.0, seed=plan.seed)
        rate = await measure_capacity(gateways, mix, num_lanes=num_lanes, seconds=CAPACITY_SECONDS)
        mix = Mix(questions, answers, answer_seconds=num_lanes / rate, seed=plan.seed + 1)
        load = OpenLoad(gateways, mix)
        return await Soak(plan, fleet, load, capacity=rate, report=report).run()


class Soak:
    """Runs a plan against a fleet."""

    def __init__(
        self,
        plan: SoakPlan,
        fleet: LocalFleet,
        load: OpenLoad,
        *,
        capacity: float,
        report: Report = silent,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._load = load
        self._capacity = capacity
        self._report = report
        self._samples = Samples()
        self._faults: list[str] = []
        self._missing: list[str] = []

    async def run(self) -> SoakOutcome:
        """The whole; every client has gone when this returns."""
        before = await self._rest()
        start = time.monotonic()
        sampling = asyncio.create_task(self._sample(start))
        harming = asyncio.create_task(self._harm(start))
        try:
            await self._load.run(rate=self._plan.load * self._capacity, seconds=self._plan.seconds)
            seconds = time.monotonic() - start
            await harming
        finally:
            sampling.cancel()
            harming.cancel()
        after = await self._rest()
        trends = self._samples.trends()
        return SoakOutcome(
            seconds=seconds,
            load=self._plan.load,
            capacity=self._capacity,
            ended=tuple(self._load.ended),
            faults=tuple(self._faults),
            before=before,
            after=after,
            trends=tuple(trends),
            leaks=(*leaks(before, after, trends), *self._missing),
            messages=tuple(self._load.messages),
        )

    async def _rest(self) -> Rest:
        """The cluster when nothing is held any more; or as it is after a long time."""
        end = time.monotonic() + REST_SECONDS
        while True:
            rest = await asyncio.to_thread(
                lambda: rest_of(self._fleet.page(), self._fleet.measured())
            )
            if (rest.is_idle and rest.processes) or time.monotonic() > end:
                return rest
            await asyncio.sleep(POLL_SECONDS)

    async def _sample(self, start: float) -> None:
        while True:
            seconds = time.monotonic() - start
            self._report(
                "seconds", min(round(seconds), round(self._plan.seconds)), round(self._plan.seconds)
            )
            self._samples.add(seconds, await asyncio.to_thread(self._fleet.measured))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _harm(self, start: float) -> None:
        """The faults, at even distances, each when the cluster is whole again."""
        planner = Planner(
            [kind for kind in self._plan.kinds if kind is not LAST], seed=self._plan.seed
        )
        distance = self._plan.seconds / (self._plan.num_faults + 1)
        for number in range(self._plan.num_faults):
            await asyncio.sleep(start + (number + 1) * distance - time.monotonic())
            fault, victim = planner.draw(await asyncio.to_thread(self._fleet.census))
            await asyncio.to_thread(self._fleet.inject, fault, victim)
            self._faults.append(fault.name)
            end = time.monotonic() + RECOVERY_SECONDS
            while missing := await asyncio.to_thread(self._fleet.missing):
                if time.monotonic() > end:
                    self._missing.append(f"after {fault.name}: {missing}")
                    return
                await asyncio.sleep(POLL_SECONDS)
