"""What computes a model here."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """What a target's steps are computed by: `num_ranks` processes with `num_threads` each."""

    name: str
    num_threads: int
    num_ranks: int = 1

    @classmethod
    def of_this_process(cls, device: torch.device) -> Self:
        """Alone, with the threads torch has now."""
        return cls(name=processor_name(device), num_threads=torch.get_num_threads())


def processor_name(device: torch.device) -> str:
    """What computes, in its maker's words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
