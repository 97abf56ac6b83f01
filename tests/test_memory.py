"""X54: what cannot fit at full load is refused before anything is loaded, with the numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from cluster import memory
from cluster.config import DrafthouseConfig, ModelDrafterConfig, TargetConfig, parse_config
from cluster.errors import ConfigurationError
from cluster.local import build_engine
from cluster.local_drafter import build_draft_model
from cluster.memory import MIB, check_fits, check_memory, host_available_bytes, target_needs
from cluster.models.spec import load_spec
from tests.checkpoints import make_checkpoint


def config_of(folder: Path, **target: object) -> DrafthouseConfig:
    sizes = {"model": str(folder), "max_model_len": 256, "max_num_seqs": 4} | target
    return parse_config({"target": sizes, "drafter": {"kind": "off"}})


def with_draft(config: DrafthouseConfig, folder: Path) -> DrafthouseConfig:
    drafter = ModelDrafterConfig(model=str(folder), placement="in_process", max_model_len=256)
    return config.model_copy(update={"drafter": drafter})


def have(monkeypatch: pytest.MonkeyPatch, available: float) -> None:
    """Let every device have so many bytes left."""
    monkeypatch.setattr(memory, "available_bytes", lambda _: int(available))


def needed(config: DrafthouseConfig, folder: Path) -> int:
    needs = target_needs(config.target, load_spec(folder), num_speculative_tokens=4)
    return sum(need.num_bytes for need in needs)


def test_x54_what_fits_exactly_is_taken_and_a_byte_less_is_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is memory_utilization of what is available, and the numbers are in the error."""
    config = config_of(checkpoints["target"], memory_utilization=0.5)
    spec = load_spec(checkpoints["target"])
    total = needed(config, checkpoints["target"])
    have(monkeypatch, 2 * total)
    check_memory(config, spec, [])
    have(monkeypatch, 2 * total - 2)
    with pytest.raises(ConfigurationError) as caught:
        check_memory(config, spec, [])
    assert re.fullmatch(
        r"\d+ MiB are needed on cpu \(target weights \d+, target KV memory \d+, target step \d+, "
        r"target runtime \d+\), "
        r"and of \d+ MiB available memory_utilization 0\.5 lets \d+ be used; lower .*",
        str(caught.value),
    )


def test_x54_a_draft_in_the_process_counts(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target alone would leave is not enough for a draft's weights and KV memory too."""
    config = config_of(checkpoints["target"], memory_utilization=1.0)
    have(monkeypatch, needed(config, checkpoints["target"]))
    build_engine(config, registry=CollectorRegistry()).target.close()
    with pytest.raises(ConfigurationError, match=r"target KV memory \d+.*draft KV memory \d+"):
        build_engine(with_draft(config, checkpoints["sibling"]), registry=CollectorRegistry())


def test_x54_a_draft_worker_is_refused_where_it_is(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model elsewhere is counted by itself, there."""
    have(monkeypatch, MIB)
    drafter = ModelDrafterConfig(model=str(checkpoints["sibling"]))
    with pytest.raises(ConfigurationError, match=r"draft weights \d+"):
        build_draft_model(drafter, vocab_size=512)


def test_devices_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full device is named, and another's room is of no use to it."""
    monkeypatch.setattr(memory, "available_bytes", {"cpu": 10 * MIB, "cuda:0": 5 * MIB}.get)
    needs = [memory.Need("cpu", "one", 8 * MIB), memory.Need("cuda:0", "two", 6 * MIB)]
    with pytest.raises(ConfigurationError, match=r"^6 MiB are needed on cuda:0 \(two 6\)"):
        check_fits(needs, utilization=1.0)


@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"max_num_seqs": 8}, "target KV memory"),
        ({"num_blocks": 9}, "target KV memory"),
        ({"max_num_batched_tokens": 4096}, "target step"),
    ],
)
def test_each_size_counts(
    checkpoints: dict[str, Path], change: dict[str, object], grows: str
) -> None:
    """More contexts and more blocks take KV memory, more rows take memory in a step."""
    spec = load_spec(checkpoints["target"])

    def by_name(config: DrafthouseConfig) -> dict[str, int]:
        needs = target_needs(config.target, spec, num_speculative_tokens=4)
        return {need.what: need.num_bytes for need in needs}

    small = by_name(config_of(checkpoints["target"]))
    large = by_name(config_of(checkpoints["target"], **change))
    assert large[grows] > small[grows]


def test_without_num_blocks_every_place_has_a_context() -> None:
    """`num_blocks` is what max_num_seqs contexts take, rounded up to blocks each."""
    assert TargetConfig(max_model_len=100, max_num_seqs=3).total_blocks == 3
    assert TargetConfig(max_model_len=100, max_num_seqs=3, block_size=16).total_blocks == 21


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    """Machine, own control group, or one above it; a group's page cache is given up when needed."""
    _write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    _write(tmp_path / "proc/self/cgroup", "4:memory:/pod\n1:cpu:/\n0::/outer/inner\n")
    assert host_available_bytes(tmp_path) == 5000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    _write(group / "outer/inner/memory.max", "max")
    _write(group / "outer/memory.max", "4000000")
    _write(group / "outer/memory.current", "1500000")
    _write(group / "outer/memory.stat", "anon 7\ninactive_file 500000\n")
    assert host_available_bytes(tmp_path) == 3_000_000
    _write(group / "memory/memory.limit_in_bytes", "2000000")
    _write(group / "memory/memory.usage_in_bytes", "2500000")
    assert host_available_bytes(tmp_path) == 0


def test_x54_full_load_takes_what_was_counted(tmp_path: Path) -> None:
    """In a process of its own: every context full, all rows verified; not a byte more than said.

    And not much less, or machines would stand empty.
    """
    folder = make_checkpoint(
        tmp_path / "model", vocab_size=8192, hidden_size=256, num_layers=4, num_heads=4
    )
    config = config_of(folder, max_model_len=1024, max_num_seqs=16, block_size=16)
    code = [sys.executable, "-m", "tests.full_load", str(folder), config.target.model_dump_json()]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    taken, counted = int(done.stdout), needed(config, folder)
    assert counted / 2 < taken < counted


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
