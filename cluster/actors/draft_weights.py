"""New draft weights on their way: checked and read once by a task, kept for all who load them.

    folder ──task on the node that has it──> object store ──ref──> every worker of the pool

The refs belong to the process that asked for them, here the router's. Ray reads a folder again by
itself where the node that held the object is lost.
"""

from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import ConfigurationError
from cluster.messages import DraftWeights


class WeightsShelf:
    """The weights that a pool may be asked to draft with, by version."""

    def __init__(self) -> None:
        self._refs: dict[tuple[str, int], ObjectRef] = {}

    async def read(self, folder: str, node_id: str, *, like: str) -> ObjectRef:
        """Read a folder's weights, which have to fit the model reference `like`.

        Raises ConfigurationError.
        """
        checked, ref = _reading(folder, node_id, like)
        try:
            await checked
        except RayTaskError as error:
            if isinstance(error.cause, ConfigurationError):
                raise error.cause from None
            raise
        return ref

    def put(self, pool: str, weights: DraftWeights, ref: ObjectRef) -> None:
        """These are the pool's weights of that version."""
        self._refs[pool, weights.version] = ref

    def ref(self, pool: str, weights: DraftWeights) -> ObjectRef:
        """Where a version's weights are or will be; read again if another process had them."""
        key = pool, weights.version
        if key not in self._refs:
            _, self._refs[key] = _reading(weights.folder, weights.node_id, None)
        return self._refs[key]

    def keep(self, pool: str, weights: DraftWeights) -> None:
        """Let go of the pool's versions that it can no longer be asked for."""
        wanted = {weights.version}
        if weights.previous is not None:
            wanted.add(weights.previous.version)
        for name, version in list(self._refs):
            if name == pool and version not in wanted:
                del self._refs[name, version]


def _reading(folder: str, node_id: str, like: str | None) -> tuple[ObjectRef, ObjectRef]:
    """Begin; the first ref tells whether they fit, the second becomes the weights."""
    task = ray.remote(_read).options(
        num_cpus=0,
        num_returns=2,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True)
        if node_id
        else "DEFAULT",
    )
    checked, ref = task.remote(folder, like)
    return checked, ref


def _read(folder_name: str, like: str | None) -> tuple[None, Any]:
    """Runs in a process of Ray's: who asks has no use for torch."""
    from cluster.drafters.vocabulary import check_same_tokenizer  # noqa: PLC0415
    from cluster.models.reference import resolve  # noqa: PLC0415
    from cluster.models.stored import check_same_model, read_stored  # noqa: PLC0415

    try:
        folder = resolve(folder_name)
        if like is not None:
            running = resolve(like)
            check_same_model(folder, like=running)
            check_same_tokenizer(running, folder)
        return None, read_stored(folder)
    except ConfigurationError as error:
        raise ConfigurationError(str(error)) from None  # any of its kinds crosses as this one
