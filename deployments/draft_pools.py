"""The router's part in what draft pools draft with: swaps, what is worse, and the weights."""

import asyncio
import logging
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from ray import ObjectRef
from ray.exceptions import RayError

from cluster.actors.draft_weights import WeightsShelf
from cluster.actors.membership import Member
from cluster.control.draft_pools import Decision, DraftPools
from cluster.control.rollback import Verdict
from cluster.errors import ConfigurationError, DrafterUnavailable
from cluster.messages import DraftLoad, DraftWeights

logger = logging.getLogger(__name__)

JUDGE_SECONDS = 1.0
ASK_SECONDS = 10.0


class PoolKeeper:
    """Hears of every draft worker, and says what its pool is to draft with.

    A trial of new weights ends here by itself; see `control.rollback`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pools = DraftPools()
        self._shelf = WeightsShelf()
        self._workers: dict[str, Member] = {}  # one of each pool, the last heard of
        self._next_judgement = 0.0
        self._versions = Gauge(
            "drafthouse_draft_pool_version",
            "Version of the weights a draft pool is to draft with.",
            ("pool",),
            registry=registry,
        )
        self._swaps = Counter(
            "drafthouse_draft_swaps",
            "Times a draft pool was given new weights.",
            ("pool",),
            registry=registry,
        )
        self._rollbacks = Counter(
            "drafthouse_draft_rollbacks",
            "Times a draft pool went back to the weights before, by itself.",
            ("pool",),
            registry=registry,
        )

    @property
    def weights(self) -> Mapping[str, DraftWeights]:
        """What each pool is to draft with."""
        return self._pools.weights

    def hear(self, member: Member) -> None:
        """A draft worker registered."""
        if not isinstance(member.load, DraftLoad):
            return
        if member.pool not in self._workers:
            self._swaps.labels(pool=member.pool)
            self._rollbacks.labels(pool=member.pool)
        self._workers[member.pool] = member
        self._pools.hear(member.pool, member.member_id, member.load)
        if (now := time.monotonic()) >= self._next_judgement:
            self._next_judgement = now + JUDGE_SECONDS
            for decision in self._pools.judge():
                self._decided(decision)

    async def swap(self, pool: str, folder: str, node_id: str) -> int:
        """Put a folder's weights into the object store and have the pool try them.

        Returns their version. Raises ConfigurationError when they do not fit the running model,
        and DrafterUnavailable when the pool has no worker that answers.
        """
        if pool not in self._workers:
            known = ", ".join(map(repr, sorted(self._workers))) or "none"
            raise ConfigurationError(f"there is no draft pool {pool!r}; there is {known}")
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reference = await self._workers[pool].handle.reference.remote()
        except (TimeoutError, RayError) as error:
            raise DrafterUnavailable("died") from error
        checked = await self._shelf.read(folder, node_id, like=reference)
        weights = self._pools.swap(pool, folder, node_id)
        self._shelf.put(pool, weights, checked)
        self._shelf.keep(pool, weights)
        self._swaps.labels(pool=pool).inc()
        logger.warning("draft pool %s tries version %d: %s", pool, weights.version, folder)
        return weights.version

    def stored(self, pool: str, version: int) -> tuple[ObjectRef, ...]:
        """The weights of the pool's version, or nothing if that is configured or not the pool's."""
        weights = self._pools.weights.get(pool)
        if weights is None or weights.version != version or version == 0:
            return ()
        return (self._shelf.ref(pool, weights),)

    def publish(self) -> None:
        """Bring the gauges up to date."""
        for pool, weights in self._pools.weights.items():
            self._versions.labels(pool=pool).set(weights.version)

    def _decided(self, decision: Decision) -> None:
        self._shelf.keep(decision.pool, decision.weights)
        if decision.verdict is Verdict.RETURN:
            self._rollbacks.labels(pool=decision.pool).inc()
        logger.warning(
            "draft pool %s %s version %d: %.3f of %d positions accepted before, %.3f of %d since",
            decision.pool,
            "returns to" if decision.verdict is Verdict.RETURN else "keeps",
            decision.weights.version,
            decision.old.rate,
            decision.old.num_verified,
            decision.new.rate,
            decision.new.num_verified,
        )
