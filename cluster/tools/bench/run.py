"""The whole set in one run, so that every ratio is of figures taken under the same conditions."""

from dataclasses import dataclass
from functools import partial

from rich.console import Group

from cluster.local import in_passing_thread
from cluster.models.reference import resolve
from cluster.tools.bench.engine import EnginePlan, bench_engine
from cluster.tools.bench.over_grpc import ServedReport, bench_served
from cluster.tools.bench.progress import Report
from cluster.tools.bench.report import EngineReport
from cluster.tools.bench.steps import StepReport, measure_steps
from cluster.tools.bench.workloads import parse_workload

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class WholeReport:
    """Everything that was measured."""

    steps: StepReport
    engines: tuple[EngineReport, ...]
    served: ServedReport

    def as_json(self) -> dict[str, object]:
        """Plain data, seconds and tokens per second."""
        return {
            "steps": self.steps.as_json(),
            "engines": [engine.as_json() for engine in self.engines],
            "served": self.served.as_json(),
        }

    def __rich__(self) -> Group:
        return Group(self.steps, *self.engines, self.served)


async def run_bench(target: str, *, report: Report) -> WholeReport:
    """Run the whole set on one target. Takes some minutes."""
    chat = EnginePlan(
        target=target,
        workload=parse_workload("chat"),
        concurrencies=(1, AT_ONCE),
        transformers=True,
    )
    served = EnginePlan(
        target=target, workload=parse_workload("chat"), concurrencies=(1, AT_ONCE, 2 * AT_ONCE)
    )
    copy = EnginePlan(target=target, workload=parse_workload("copy"), max_tokens=128)
    measure = partial(measure_steps, target, resolve(target), ("float32", "int8"), report=report)
    return WholeReport(
        steps=await in_passing_thread(measure),
        engines=(await bench_engine(chat, report=report), await bench_engine(copy, report=report)),
        served=await bench_served(served, report=report),
    )
