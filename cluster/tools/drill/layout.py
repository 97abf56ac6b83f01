"""A configuration spread over the nodes of one machine, each part where its faults can be told."""

from dataclasses import dataclass
from typing import Any

from cluster.config import (
    DrafthouseConfig,
    draft_models,
    drafter_from_flag,
    parse_config,
)

TINY: dict[str, Any] = {"max_model_len": 1024, "num_threads": 1}
NUM_GATEWAYS = NUM_EDGES = 2
SMALL = 0.1  # CPUs of what does not compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many nodes there are, beside the head, and what a node of each kind offers.

    head       Serve's controller, the HTTP proxy and the router
    target     room for one target, all its ranks included
    edge       room for a gateway and a draft worker
    """

    num_targets: int = 2
    num_edges: int = NUM_EDGES
    target: dict[str, float]
    edge: dict[str, float]


def layout(num_targets: int) -> Layout:
    """The nodes for so many targets."""
    return Layout(num_targets=num_targets, target={"target": 1}, edge={"gateway": 1, "draft": 1})


def spread(
    config: DrafthouseConfig, *, num_targets: int, host: str, http_port: int, num_seqs: int
) -> DrafthouseConfig:
    """The configuration with a target, a gateway and a draft worker on each node for them.

    Gateways take any port: they share one address here. An engine runs `num_seqs` sequences, and
    lets as many wait. Raises ConfigurationError.
    """
    data = config.model_dump(mode="json")
    ranks = config.target.tensor_parallel_size
    data["target"] |= {
        "num_replicas": num_targets,
        "max_num_seqs": num_seqs,
        "max_num_waiting": num_seqs,
        "resources": {"CPU": 0.5, "target": 1 / ranks},
    }
    data["router"] |= {"resources": {"CPU": SMALL, "head": 0.5}}
    data["gateway"] |= {
        "host": host,
        "grpc_port": 0,
        "http_port": http_port,
        "num_replicas": NUM_GATEWAYS,
        "resources": {"CPU": SMALL, "gateway": 1},
        "tls": None,
        "keys": None,
    }
    data["autoscaling"] = {}
    members = [data["drafter"], *data["drafter"].get("drafters", ())]
    pools = [each for each in members if each.get("placement") == "worker"]
    for pool in pools:
        share = {"CPU": SMALL, "draft": 1 / len(pools)}
        pool.update({"num_replicas": NUM_EDGES, "resources": share})
    return parse_config(data)


def configured(
    target: str, *, draft: str | None, tensor_parallel_size: int, tiny: bool
) -> DrafthouseConfig:
    """A configuration for a model; without `draft` it drafts for itself, in draft workers."""
    sizes: dict[str, Any] = TINY if tiny else {}
    model = target if draft is None else draft
    fields = sizes if model not in {"ngram", "off"} else {}
    drafter = drafter_from_flag(model, placement="worker", **fields)
    return parse_config(
        {
            "name": "drill",
            "target": {"model": target, "tensor_parallel_size": tensor_parallel_size, **sizes},
            "drafter": drafter.model_dump(mode="json"),
            "speculation": {"policy": "fixed", "num_speculative_tokens": 4},
        }
    )


def num_draft_supervisors(config: DrafthouseConfig) -> int:
    """How many draft workers have a deployment of their own."""
    return sum(
        model.num_replicas for model in draft_models(config.drafter) if model.placement == "worker"
    )


def num_draft_workers(config: DrafthouseConfig) -> int:
    """How many draft workers there are, those beside targets included."""
    beside = [model for model in draft_models(config.drafter) if model.placement == "colocated"]
    colocated = config.target.num_replicas * sum(model.num_replicas for model in beside)
    return num_draft_supervisors(config) + colocated
