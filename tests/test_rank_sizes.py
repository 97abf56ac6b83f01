"""What a target of several ranks takes, and what of it is refused before anything starts."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster import cli_serve, memory
from cluster.config import DrafthouseConfig, TargetConfig, parse_config
from cluster.errors import ConfigurationError
from cluster.local import build_engine
from cluster.memory import check_rank_memory, target_needs
from cluster.models.shard import Shard
from cluster.models.spec import load_spec


def config_of(folder: Path, **target: object) -> DrafthouseConfig:
    sizes = {"model": str(folder), "max_model_len": 256, "tensor_parallel_size": 2}
    return parse_config({"target": sizes | target, "drafter": {"kind": "off"}})


def test_a_rank_takes_about_its_part(checkpoints: dict[str, Path]) -> None:
    """Weights and KV memory of two ranks are those of one, norms and such aside."""
    spec = load_spec(checkpoints["target"])
    config = config_of(checkpoints["target"]).target
    one, shard = Shard.of(spec), Shard.of(spec, 0, 2)
    weights, kv_memory = (
        [
            need.num_bytes
            for part in (one, shard)
            for need in target_needs(
                config, part.spec, num_speculative_tokens=4, num_entries=part.vocabulary_size
            )
            if need.what == what
        ]
        for what in ("target weights", "target KV memory")
    )
    assert weights[1] == weights[0] / 2
    assert kv_memory[1] == kv_memory[0] / 2


def test_ranks_of_one_node_have_to_fit_together(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks before any loads: what is left is counted for all of them."""
    config = config_of(checkpoints["target"], memory_utilization=1.0)
    shard = Shard.of(load_spec(checkpoints["target"]), 1, 2)
    needs = target_needs(
        config.target, shard.spec, num_speculative_tokens=8, num_entries=shard.vocabulary_size
    )
    total = sum(need.num_bytes for need in needs)
    monkeypatch.setattr(memory, "available_bytes", lambda _: 2 * total - 1)
    check_rank_memory(config, shard, num_ranks_here=1)
    with pytest.raises(ConfigurationError, match="target weights"):
        check_rank_memory(config, shard, num_ranks_here=2)


def test_a_replica_has_a_bundle_for_each_process() -> None:
    """One process computes in the engine's own; several stand beside it, all alike."""
    one = TargetConfig(resources={"GPU": 1.0})
    assert one.bundles == [{"GPU": 1.0}]
    two = TargetConfig(
        resources={"GPU": 1.0}, engine_resources={"CPU": 2.0}, tensor_parallel_size=2
    )
    assert two.bundles == [{"CPU": 2.0}, {"GPU": 1.0}, {"GPU": 1.0}]


def test_ray_counts_with_the_cpus_of_every_rank() -> None:
    """Or the placement group of a replica would wait for ever."""
    config = parse_config({"target": {"tensor_parallel_size": 3, "resources": {"CPU": 2.0}}})
    assert cli_serve._num_cpus(config) >= 3 * 2.0 + 0.5


def test_one_process_cannot_stand_for_several(checkpoints: dict[str, Path]) -> None:
    """Commands that answer without a cluster say so, and do not quietly load it all."""
    with pytest.raises(ConfigurationError, match="tensor_parallel_size: 2 ranks"):
        build_engine(config_of(checkpoints["target"]), registry=CollectorRegistry())


def test_serving_refuses_at_once_what_cannot_be_split(checkpoints: dict[str, Path]) -> None:
    """Before Ray is started, with the numbers."""
    config = config_of(checkpoints["target"], tensor_parallel_size=5)
    with pytest.raises(ConfigurationError, match="5 ranks cannot split 4 attention heads"):
        cli_serve._check_models(config)
