"""Ranks as processes of a test's own: gloo, no Ray."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cluster.models.parallel import Ranks, join_ranks, leave_ranks, open_store, reach_store

T = TypeVar("T")
SECONDS = 600.0
HOST = "127.0.0.1"


def on_ranks(num_ranks: int, compute: Callable[[Ranks], T]) -> list[T]:
    """What `compute`, a function of a module and its arguments, returns on each rank, in order."""
    store = open_store(HOST, num_ranks, timeout_seconds=SECONDS)
    with tempfile.TemporaryDirectory() as name:
        task = Path(name) / "task"
        task.write_bytes(pickle.dumps(compute))
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    str(task),
                    str(rank),
                    str(num_ranks),
                    str(store.port),
                ],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(num_ranks)
        ]
        try:
            codes = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * num_ranks
        return [
            pickle.loads((Path(name) / f"task.{rank}").read_bytes())  # noqa: S301 - just written
            for rank in range(num_ranks)
        ]


def main(task: str, rank: int, num_ranks: int, port: int) -> None:
    """One rank's process."""
    store = reach_store(HOST, port, num_ranks, timeout_seconds=SECONDS)
    ranks = join_ranks(store, rank=rank, num_ranks=num_ranks, device="cpu", timeout_seconds=SECONDS)
    result = pickle.loads(Path(task).read_bytes())(ranks)  # noqa: S301 - by the test
    Path(f"{task}.{rank}").write_bytes(pickle.dumps(result))
    leave_ranks()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
