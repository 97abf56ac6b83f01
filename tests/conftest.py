"""Fixtures for all tests."""

from pathlib import Path

import pytest
from hypothesis import settings
from prometheus_client import CollectorRegistry

from cluster.metrics import EngineMetrics

# The same examples every time, and no limit on an example's time: neighbours share the machine.
settings.register_profile("project", derandomize=True, deadline=None)
settings.load_profile("project")


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own for each test."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> EngineMetrics:
    """An engine's metrics in `registry`."""
    return EngineMetrics(registry, model="fake", num_positions=16)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny llama checkpoints of one vocabulary: a `target`, and a `random` stranger to it."""
    from tests.checkpoints import make_checkpoint  # noqa: PLC0415 - control tests need no torch

    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_checkpoint(folder / name, seed=seed)
        for name, seed in (("target", 1), ("random", 2))
    }
