"""Start-up profiles, kept so that the next start on the same machine need not measure again.

One JSON file a profile in `profiles_folder`, named by what it was measured on. A file that cannot
be read, or that is of something else than its name says, is as good as none.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path

import torch

from cluster.config.environment import profiles_folder
from cluster.control.cost import CostTable
from cluster.control.policy import StepShape
from cluster.profiling.steps import Timeable, measure_points

logger = logging.getLogger(__name__)

VERSION = 2  # raise it when what is measured changes
LEAST_OF_FEWER_ROWS = 0.7

Points = dict[StepShape, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """All that the seconds of a step depend on. Models of equal shape share their profile."""

    model: str  # a digest of its configuration and of the sizes of its weights
    dtype: str
    processor: str
    num_threads: int
    num_ranks: int
    torch: str
    max_num_seqs: int
    max_num_speculative_tokens: int
    max_model_len: int
    block_size: int
    version: int = VERSION

    @property
    def file_name(self) -> str:
        """The same for equal keys only."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def stored_profile(
    worker: Timeable,
    *,
    folder: Path,
    dtype: str,
    max_num_seqs: int,
    max_num_speculative_tokens: int,
    max_model_len: int,
    profiles: Path | None = None,
) -> CostTable:
    """The cost table of this target on this machine: the stored one, or measured and stored now.

    `folder` is the model's; `profiles` is `profiles_folder` if not given, and one that cannot be
    written to costs the next start some seconds, and nothing else. Otherwise as `profile_steps`.
    """
    sizes = {
        "max_num_seqs": max_num_seqs,
        "max_num_speculative_tokens": max_num_speculative_tokens,
        "max_model_len": max_model_len,
    }
    key = profile_key(worker, folder=folder, dtype=dtype, **sizes)
    profiles = profiles or profiles_folder()
    points = load_points(profiles, key)
    if points is None:
        points = measure_points(worker, **sizes)
        if is_disturbed(points):
            logger.warning("the machine was busy while steps were timed: the profile is not kept")
        else:
            save_points(profiles, key, points)
    return CostTable(points)


def profile_key(
    worker: Timeable,
    *,
    folder: Path,
    dtype: str,
    max_num_seqs: int,
    max_num_speculative_tokens: int,
    max_model_len: int,
) -> ProfileKey:
    """What this target's profile is stored under; `folder` is the model's."""
    processor = worker.processor
    return ProfileKey(
        model=model_identity(folder),
        dtype=dtype,
        processor=processor.name,
        num_threads=processor.num_threads,
        num_ranks=processor.num_ranks,
        torch=torch.__version__,
        max_num_seqs=max_num_seqs,
        max_num_speculative_tokens=max_num_speculative_tokens,
        max_model_len=max_model_len,
        block_size=worker.cache.block_size,
    )


def load_points(profiles: Path, key: ProfileKey) -> Points | None:
    """The stored points of exactly that key, if there are any that make sense."""
    path = profiles / key.file_name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != asdict(key):
            return None
        return {_shape(*shape): _seconds(seconds) for *shape, seconds in content["points"]} or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("profile %s is not readable, measuring anew: %r", path, error)
        return None


def save_points(profiles: Path, key: ProfileKey, points: Mapping[StepShape, float]) -> None:
    """Store them: the file appears whole or not at all, whoever else writes it."""
    content = {
        "key": asdict(key),
        "points": [
            [shape.num_sequences, shape.num_rows, shape.num_context_tokens, seconds]
            for shape, seconds in points.items()
        ],
    }
    try:
        profiles.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=profiles, suffix=".partial")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        Path(partial).replace(profiles / key.file_name)
    except OSError as error:
        logger.warning("the profile could not be stored in %s: %s", profiles, error)


def is_disturbed(points: Mapping[StepShape, float]) -> bool:
    """Whether some step took much less than one of fewer rows, all else being equal."""
    series: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for shape, seconds in points.items():
        series[shape.num_sequences, shape.num_context_tokens].append((shape.num_rows, seconds))
    return any(
        more < LEAST_OF_FEWER_ROWS * fewer
        for steps in series.values()
        for (_, fewer), (_, more) in pairwise(sorted(steps))
    )


def model_identity(folder: Path) -> str:
    """What two models have in common whose steps take equally long."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _shape(num_sequences: int, num_rows: int, num_context_tokens: int) -> StepShape:
    """A stored shape. Raises ValueError for one that cannot be."""
    numbers = (num_sequences, num_rows, num_context_tokens)
    if not all(type(number) is int and number > 0 for number in numbers):
        message = f"{numbers} is no shape of a step"
        raise ValueError(message)
    return StepShape(
        num_sequences=num_sequences, num_rows=num_rows, num_context_tokens=num_context_tokens
    )


def _seconds(seconds: object) -> float:
    """A stored time. Raises ValueError for one that cannot be."""
    if not isinstance(seconds, float) or not isfinite(seconds) or seconds <= 0:
        message = f"{seconds!r} is no time of a step"
        raise ValueError(message)
    return seconds
