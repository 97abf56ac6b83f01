"""Whether it all fits, counted from configuration and checkpoints' shapes before any is loaded.

A process that runs out of memory at full load takes all its requests with it, hours after the
mistake. So everything is counted as at full load: weights, KV memory of all blocks, and what the
largest step works with.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.config import DrafthouseConfig, DType, ModelDrafterConfig, TargetConfig
from cluster.drafters.heads.size import HeadSize
from cluster.drafters.model import MAX_ROWS
from cluster.errors import ConfigurationError
from cluster.models.kv_cache import KEY_CHUNK, round_up
from cluster.models.screen import is_screened
from cluster.models.shard import Shard
from cluster.models.spec import ModelSpec

MIB = 2**20
LINEAR_BYTES = {"float32": 4, "int8": 1, "bfloat16": 2, "float16": 2}
OTHER_BYTES = {"float32": 4, "int8": 4, "bfloat16": 2, "float16": 2}
SAMPLING_BYTES = 32  # for a logit: itself, its processed copy, both in order, their ids, float64
KERNELS_BYTES = 256 * MIB  # what compiling takes, and the compiler stays
RUNTIME_BYTES = 64 * MIB  # buffers of libraries and threads, slack of the allocator
LOADING_COPIES = 3  # of a linear's weight in float32, while it is joined, scaled and laid out


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one thing takes on a device."""

    device: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The most that one model is asked to do: blocks held, rows in a step, rows sampled in it."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_rows: int
    max_sampled_rows: int


def check_memory(
    config: DrafthouseConfig,
    target: ModelSpec,
    drafts: Iterable[tuple[ModelDrafterConfig, ModelSpec]],
    heads: Iterable[HeadSize] = (),
) -> None:
    """Refuse what would not fit at full load: `drafts` and `heads` in the target's own process.

    Raises ConfigurationError with every number, in MiB.
    """
    needs = target_needs(
        config.target,
        target,
        num_speculative_tokens=config.speculation.num_speculative_tokens,
    )
    for draft, spec in drafts:
        needs += draft_needs(draft, spec)
    for head in heads:
        needs += head_needs(config.target, target, head)
    check_fits(needs, utilization=config.target.memory_utilization)


def check_draft_memory(config: ModelDrafterConfig, spec: ModelSpec) -> None:
    """Refuse a draft model that does not fit where it is. Raises ConfigurationError."""
    check_fits(draft_needs(config, spec), utilization=config.memory_utilization)


def check_rank_memory(config: DrafthouseConfig, shard: Shard, *, num_ranks_here: int) -> None:
    """Refuse a rank's part of the target where that, or all ranks of this node, do not fit.

    Call it before any of them loads: on CPUs they share the memory. Raises ConfigurationError.
    """
    needs = target_needs(
        config.target,
        shard.spec,
        num_speculative_tokens=config.speculation.num_speculative_tokens,
        num_entries=shard.vocabulary_size,
    )
    on_host = torch.device(config.target.device).type == "cpu"
    check_fits(
        needs * (num_ranks_here if on_host else 1), utilization=config.target.memory_utilization
    )


def target_needs(
    config: TargetConfig,
    spec: ModelSpec,
    *,
    num_speculative_tokens: int,
    num_entries: int | None = None,
) -> tuple[Need, ...]:
    """What a target takes at its largest batch times K + 1 rows.

    A rank holds `num_entries` of the vocabulary, and what its own spec says of the rest.
    """
    return _needs(
        "target",
        config.device,
        config.dtype,
        spec,
        Load(
            num_blocks=config.total_blocks,
            block_size=config.tokens_per_block,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_rows=config.max_num_batched_tokens,
            max_sampled_rows=config.max_num_seqs * (num_speculative_tokens + 1),
        ),
        num_entries=num_entries,
    )


def draft_needs(config: ModelDrafterConfig, spec: ModelSpec) -> tuple[Need, ...]:
    """What a draft model takes with every context full."""
    return _needs(
        "draft",
        config.device,
        config.dtype,
        spec,
        Load(
            num_blocks=config.max_num_seqs,
            block_size=config.max_model_len,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_rows=MAX_ROWS,
            max_sampled_rows=config.max_num_seqs,
        ),
    )


def head_needs(config: TargetConfig, target: ModelSpec, head: HeadSize) -> tuple[Need, ...]:
    """What a head takes beside the target, with every sequence's context full."""
    linear, other = LINEAR_BYTES[head.dtype or config.dtype], OTHER_BYTES[config.dtype]
    device, num_seqs = config.device, config.max_num_seqs
    kept = num_seqs * head.num_rows * head.row_width * other
    kv_memory = num_seqs * round_up(head.context, KEY_CHUNK) * head.kv_width * other
    rows = num_seqs * head.max_rows * head.pass_width * max(other, 4)
    logits = max(num_seqs, 2) * target.vocab_size * SAMPLING_BYTES
    return (
        Need(device, "head weights", head.num_weights * linear),
        Need(device, "head KV memory", kv_memory),
        Need(device, "hidden states", kept),
        Need(device, "head step", max(rows, logits)),
    )


def check_fits(needs: Sequence[Need], *, utilization: float) -> None:
    """Raises ConfigurationError, with all numbers, unless the needs fit into what is available."""
    by_device: dict[str, list[Need]] = defaultdict(list)
    for need in needs:
        by_device[need.device].append(need)
    for device, its in by_device.items():
        needed = sum(need.num_bytes for need in its)
        available = available_bytes(device)
        if needed > available * utilization:
            parts = ", ".join(f"{need.what} {_mib(need.num_bytes)}" for need in its)
            raise ConfigurationError(
                f"{_mib(needed)} MiB are needed on {device} ({parts}), and of "
                f"{_mib(available)} MiB available memory_utilization {utilization} lets "
                f"{_mib(available * utilization)} be used; lower max_num_seqs, max_model_len, "
                f"num_blocks or max_num_batched_tokens"
            )


def available_bytes(device: str) -> int:
    """Bytes that this process may still take there."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return host_available_bytes(Path("/"))


def host_available_bytes(root: Path) -> int:
    """The least of what the machine has left and what each control group of ours has left."""
    meminfo = (root / "proc/meminfo").read_text()
    [line] = [line for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    return min([int(line.split()[1]) * 1024, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left under the limit of every control group this process is in, page cache aside."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / name.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base) and (group / limit).is_file():
                text = (group / limit).read_text().strip()
                if text != "max":
                    used = int((group / usage).read_text()) - _page_cache(group)
                    yield max(int(text) - used, 0)


def _page_cache(group: Path) -> int:
    """Bytes of the group's usage that are given up when they are needed."""
    path = group / "memory.stat"
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _kernels_bytes(device: str, dtype: DType) -> int:
    """What compiled kernels take, where a model has them."""
    is_float = OTHER_BYTES[dtype] == OTHER_BYTES["float32"]
    return KERNELS_BYTES if torch.device(device).type == "cpu" and is_float else 0


def _needs(
    who: str,
    device: str,
    dtype: DType,
    spec: ModelSpec,
    load: Load,
    *,
    num_entries: int | None = None,
) -> tuple[Need, ...]:
    linear, other = LINEAR_BYTES[dtype], OTHER_BYTES[dtype]
    stride = (
        load.block_size if load.block_size < KEY_CHUNK else round_up(load.block_size, KEY_CHUNK)
    )
    kv_slot = 2 * spec.num_kv_heads * spec.head_dim * other
    head = (num_entries or spec.vocab_size) * spec.hidden_size
    weights = head * other + (head + spec.num_layers * sum(_linear_sizes(spec))) * linear
    if is_screened(spec, dtype=dtype, device=device):
        weights += head  # once more, an int8 each
    loading = LOADING_COPIES * 4 * max(head if dtype == "int8" else 0, *_linear_sizes(spec))
    return (
        Need(device, f"{who} weights", weights),
        Need(device, f"{who} KV memory", spec.num_layers * load.num_blocks * stride * kv_slot),
        Need(device, f"{who} step", max(loading, _step_bytes(spec, load, kv_slot, other))),
        Need(device, f"{who} runtime", RUNTIME_BYTES + _kernels_bytes(device, dtype)),
    )


def _linear_sizes(spec: ModelSpec) -> tuple[int, int, int, int]:
    """Weights of one layer's linears: qkv, output, gate and up, down."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = spec.num_heads * spec.head_dim
    qkv = attention + 2 * spec.num_kv_heads * spec.head_dim
    return hidden * qkv, attention * hidden, 2 * hidden * inner, inner * hidden


def _step_bytes(spec: ModelSpec, load: Load, kv_slot: int, element: int) -> int:
    """What the largest step works with: one layer's activations, its attention, the logits."""
    num_rows, num_keys = max(load.max_rows, 2), round_up(load.max_model_len, KEY_CHUNK)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    activations = num_rows * (4 * spec.hidden_size + 3 * heads + 4 * spec.intermediate_size)
    scores = num_rows * spec.num_heads * num_keys
    gathered = 0
    if load.block_size < load.max_model_len:
        num_pieces = num_rows // KEY_CHUNK + min(load.max_num_seqs, num_rows)
        gathered = num_pieces * num_keys * kv_slot
    num_sampled = max(min(load.max_sampled_rows, num_rows), 2)
    logits = num_sampled * spec.vocab_size * SAMPLING_BYTES
    return max((activations + scores) * max(element, 4) + gathered, logits)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.0f}"
