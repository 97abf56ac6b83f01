"""What every test of the whole cluster stands on. Each module has a Ray of its own."""

import asyncio
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import PydanticDeprecatedSince20

from tests.checkpoints import make_checkpoint

END_SECONDS = 180.0  # agents of a node that was killed notice late
MARK = "DRAFTHOUSE_TEST_MODULE"  # in the environment of every process a module starts

with warnings.catch_warnings(category=PydanticDeprecatedSince20, action="ignore"):
    import ray.serve  # noqa: F401 - imported once, here, where its own warnings are let pass

    from tests.cluster.harness import NUM_TOKENS, PROMPTS, Answer, in_process, make_config


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """After a module's last test every process that it started, at whatever remove, has ended."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    yield
    del os.environ[MARK]
    end = time.monotonic() + END_SECONDS
    while (left := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", num_layers=3)


@pytest.fixture(scope="session")
def expected(target_folder: Path) -> list[Answer]:
    """What an engine in this process says to each of PROMPTS, without Ray and without drafts."""
    config = make_config(target_folder)
    return asyncio.run(in_process(config, PROMPTS, max_tokens=NUM_TOKENS))


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(f"{process.pid} {process.name()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
