"""What a configuration says before anything is served: memory, and what steps cost here."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cluster.config import (
    ChoiceDrafterConfig,
    DrafthouseConfig,
    ModelDrafterConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
)
from cluster.config.environment import profiles_folder
from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.memory import Need, available_bytes, draft_needs, target_needs
from cluster.models.load import load_spec
from cluster.models.reference import resolve
from cluster.profiling.steps import CONTEXTS
from cluster.profiling.store import Points, ProfileKey, load_points, model_identity
from cluster.tools.choosing.facts import DrafterFacts, Facts, Place, StepCosts

PLACES = {
    "in_process": Place.IN_PROCESS,
    "worker": Place.WORKERS,
    "colocated": Place.COLOCATED,
}


def configured_facts(config: DrafthouseConfig) -> Facts:
    """What is known of a configuration; of steps, what a profile that was stored here says.

    Raises ConfigurationError for models that cannot be served.
    """
    target = config.target
    folder = resolve(target.model)
    needs = target_needs(
        target,
        load_spec(folder),
        num_speculative_tokens=config.speculation.num_speculative_tokens,
    )
    points = _profile(config, folder)
    return Facts(
        model=config.name,
        num_engines=target.num_replicas,
        max_num_seqs=target.max_num_seqs,
        most_depth=max(config.speculation.num_speculative_tokens, 1),
        costs=None if points is None else costs_of(CostTable(points)),
        weight_bytes=_bytes(needs, "weights"),
        kv_bytes=_bytes(needs, "KV memory"),
        available_bytes=available_bytes(target.device),
        drafters=tuple(_drafters(config)),
    )


def joined(live: Facts, configured: Facts) -> Facts:
    """What was seen of a cluster, with what only its configuration says: memory, places, costs.

    The profile's costs are moved to what steps really take where that was seen.
    """
    costs = live.costs
    if configured.costs is not None:
        costs = configured.costs
        if live.costs is not None:
            seen = live.costs.floor_seconds / costs.floor_seconds
            costs = StepCosts.of((rows, seen * seconds) for rows, seconds in costs.points)
    known = {each.name: each for each in configured.drafters}
    drafters = tuple(
        replace(each, place=known[each.name].place, memory_bytes=known[each.name].memory_bytes)
        if each.name in known
        else each
        for each in live.drafters
    )
    return replace(
        live,
        costs=costs,
        weight_bytes=configured.weight_bytes,
        kv_bytes=configured.kv_bytes,
        drafters=drafters,
    )


def costs_of(table: CostTable) -> StepCosts:
    """A table's seconds by rows, of one sequence after a short context."""
    shape = StepShape(num_sequences=1, num_rows=1, num_context_tokens=CONTEXTS[0])
    measured = sorted({1, *(each.num_rows for each in table.points)})
    return StepCosts.of((rows, table.seconds(shape, rows - 1)) for rows in measured)


def _drafters(config: DrafthouseConfig) -> Iterator[DrafterFacts]:
    drafter = config.drafter
    if isinstance(drafter, NoDrafterConfig):
        return
    members = drafter.drafters if isinstance(drafter, ChoiceDrafterConfig) else (drafter,)
    for member in members:
        if isinstance(member, ModelDrafterConfig):
            needs = draft_needs(member, load_spec(resolve(member.model)))
            yield DrafterFacts(
                name=member.pool,
                place=PLACES[member.placement],
                memory_bytes=sum(need.num_bytes for need in needs),
                num_workers=member.num_replicas if member.in_workers else 0,
            )
        elif isinstance(member, NgramDrafterConfig):
            yield DrafterFacts(name=member.kind)
        else:  # a head, on the target's own hidden states
            yield DrafterFacts(name=member.pool)


def _profile(config: DrafthouseConfig, folder: Path) -> Points | None:
    """The stored points of that model in that format; of several those of the sizes nearest."""
    target = config.target
    identity = model_identity(folder)
    found = []
    for path in sorted(profiles_folder().glob("*.json")):
        key = _key(path)
        if key is None or (key.model, key.dtype) != (identity, target.dtype):
            continue
        if key.num_ranks == target.tensor_parallel_size:
            points = load_points(path.parent, key)
            if points is not None:
                apart = abs(key.max_num_seqs - target.max_num_seqs)
                found.append((apart, path.name, points))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _key(path: Path) -> ProfileKey | None:
    """What a stored profile is of, if the file is one."""
    try:
        return ProfileKey(**json.loads(path.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _bytes(needs: tuple[Need, ...], what: str) -> int:
    return sum(need.num_bytes for need in needs if need.what.endswith(what))
