"""The processes of a cluster on this machine: found by the titles Ray gives them, and harmed."""

import os
import signal
from dataclasses import dataclass

import psutil

from cluster.tools.drill.faults import Harm, Part

TITLES: dict[Part, str] = {
    Part.ENGINE: "ray::EngineActor",
    Part.RANK: "ray::RankActor",
    Part.TARGET: "ray::ServeReplica:drafthouse:Target",
    Part.DRAFT: "ray::DraftWorker",
    Part.KEEPER: "ray::ServeReplica:drafthouse:Draft",
    Part.GATEWAY: "ray::ServeReplica:drafthouse:Gateway",
    Part.ROUTER: "ray::ServeReplica:drafthouse:Router",
    Part.CONTROLLER: "ray::ServeController",
}
SIGNALS = {Harm.KILL: signal.SIGKILL, Harm.STOP: signal.SIGSTOP, Harm.PAUSE: signal.SIGSTOP}


def found() -> dict[Part, list[psutil.Process]]:
    """The processes of each part, oldest first; those that are stopped among them."""
    processes: dict[Part, list[psutil.Process]] = {part: [] for part in TITLES}
    for process in psutil.Process().children(recursive=True):
        title = _title(process)
        for part, beginning in TITLES.items():
            if title.startswith(beginning):
                processes[part].append(process)
    return {part: sorted(each, key=_started) for part, each in processes.items()}


def is_stopped(process: psutil.Process) -> bool:
    """Whether it does nothing because it was told to."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def has_ancestor(process: psutil.Process, pids: set[int]) -> bool:
    """Whether one of these started it, at whatever remove."""
    try:
        return any(parent.pid in pids for parent in process.parents())
    except psutil.Error:
        return False


def harm(pid: int, how: Harm) -> None:
    """Send the signal; a process that is gone already is as harmed as can be."""
    try:
        os.kill(pid, SIGNALS[how])
    except ProcessLookupError:
        return


def resume(pid: int) -> None:
    """End a pause."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


@dataclass(frozen=True, slots=True)
class Measure:
    """A process at one moment: its memory in bytes, and its open descriptors."""

    part: Part
    pid: int
    memory: int
    descriptors: int


def measured() -> list[Measure]:
    """Every process of the cluster now."""
    measures = []
    for part, processes in found().items():
        for process in processes:
            try:
                with process.oneshot():
                    memory, descriptors = process.memory_info().rss, process.num_fds()
            except psutil.Error:
                continue
            measures.append(Measure(part, process.pid, memory, descriptors))
    return measures


def _title(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return command[0] if command else ""


def _started(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:
        return 0.0
