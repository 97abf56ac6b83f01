"""How many replicas a simulated cluster should have: the scalers that Serve is given, too."""

from collections.abc import Mapping, Sequence

from cluster.config import DrafthouseConfig, ReplicaLimits, draft_models
from cluster.control.damper import Limits
from cluster.control.demand import TargetLoad
from cluster.control.scaling import DraftingLoad, DraftScaler, TargetScaler
from cluster.tools.simulation.engines import SimulatedEngine


class Sizes:
    """By the sections `autoscaling`, `target` and `drafter`."""

    def __init__(self, config: DrafthouseConfig) -> None:
        section = config.autoscaling
        workers = sum(
            model.num_replicas for model in draft_models(config.drafter) if model.in_workers
        )
        self.num_targets = config.target.num_replicas
        self.num_drafts = workers
        self._targets: TargetScaler | None = None
        self._drafts: DraftScaler | None = None
        if section.target is not None:
            self.num_targets = section.target.initial(self.num_targets)
            self._targets = TargetScaler(
                _limits(section.target),
                target_delay_seconds=section.target.target_delay_seconds,
                utilization=section.target.utilization,
            )
        if section.drafts is not None and workers:
            self.num_drafts = section.drafts.initial(workers)
            self._drafts = DraftScaler(
                _limits(section.drafts),
                cost_ratio=section.drafts.cost_ratio,
            )

    def targets(self, engines: Mapping[str, SimulatedEngine], *, current: int, now: float) -> int:
        """The targets from now on."""
        if self._targets is None:
            return current
        loads = [TargetLoad.of(engine.load()) for engine in engines.values()]
        return self._targets.desired(loads, current=current, now=now)

    def drafts(self, loads: Sequence[DraftingLoad], *, current: int, now: float) -> int:
        """The draft workers from now on."""
        if self._drafts is None:
            return current
        return self._drafts.desired(loads, current=current, now=now)


def _limits(section: ReplicaLimits) -> Limits:
    return Limits(
        min_replicas=section.min_replicas,
        max_replicas=section.max_replicas,
        upscale_delay_seconds=section.upscale_delay_seconds,
        downscale_delay_seconds=section.downscale_delay_seconds,
    )
