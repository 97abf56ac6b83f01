"""Draft pools: two engines share workers that come, go and change their weights; no token changes.

One Ray for the module, and on it one application after the other.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray import serve
from ray.serve._private.common import DeploymentID

from cluster.actors import session
from cluster.config import DrafthouseConfig, parse_config
from cluster.errors import ConfigurationError
from deployments.app import build
from tests.checkpoints import make_checkpoint
from tests.cluster.harness import (
    NUM_TOKENS,
    PATIENCE_SECONDS,
    Answer,
    Served,
    after_tokens,
    ask_all,
    make_config,
    processes,
    until,
    worker_drafter,
)

pytestmark = [pytest.mark.ray, pytest.mark.wire]

COMMAND = Path(sys.executable).with_name("drafthouse")
NUM_CPUS = 4  # that Ray counts with; a target takes 0.5, a draft worker 0.25
EXCHANGES = "drafthouse_draft_exchanges_total"
ACCEPTED = "drafthouse_spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def gateway(target_folder: Path, expected: list[Answer]) -> Iterator[dict[str, object]]:
    """A Ray of this module's own; what all its applications have as their section `gateway`."""
    del expected  # computed before Ray takes the cores
    config = make_config(target_folder)
    with session.local_ray(NUM_CPUS, config.gateway):
        yield config.gateway.model_dump(mode="json") | {"resources": {"CPU": 0.1}}


@contextmanager
def application(config: DrafthouseConfig) -> Iterator[Served]:
    """The application, ready, whose deployments may be scaled by hand."""
    target = serve.RunTarget(
        target=build(config), name=session.APP_NAME, route_prefix="/", external_scaler_enabled=True
    )
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    port = session.await_ready(handle, progress=lambda _: None)
    host = config.gateway.host
    try:
        yield Served(config, f"{host}:{port}", f"{host}:{config.gateway.http_port}")
    finally:
        serve.delete(session.APP_NAME)


def sections(folder: Path, gateway: object, drafter: object, *, num_targets: int) -> object:
    """A configuration in which everything fits into NUM_CPUS."""
    config = make_config(folder).model_dump(mode="json")
    target = config["target"] | {"num_replicas": num_targets, "resources": {"CPU": 0.5}}
    return config | {"target": target, "gateway": gateway, "drafter": drafter}


def pool(folder: Path, name: str, **fields: object) -> dict[str, object]:
    """A pool of small workers."""
    return worker_drafter(folder) | {"name": name, "resources": {"CPU": 0.25}} | fields


def scale(deployment: str, num_replicas: int) -> None:
    """As an operator's scaler would."""
    controller = serve.context._get_global_client()._controller
    name = DeploymentID(name=deployment, app_name=session.APP_NAME)
    ray.get(controller.update_deployment_replicas.remote(name, num_replicas))


def swap(name: str, folder: Path) -> int:
    """New weights for a pool, by a call."""
    router = serve.get_deployment_handle("Router", session.APP_NAME)
    version: int = router.swap_draft.remote(name, str(folder), "").result(timeout_s=60)
    return version


async def swap_by_command(name: str, folder: Path) -> None:
    """The same from a shell."""
    address = ray.get_runtime_context().gcs_address
    command = await asyncio.create_subprocess_exec(
        *(COMMAND, "swap-draft", name, folder, "--address", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await command.communicate()
    assert command.returncode == 0
    assert b"as version 1" in output
    assert b"ray.serve" not in errors, "what Serve has to say is for its log files"


async def under_load(
    served: Served, expected: list[Answer], done: Callable[[], bool] | Awaitable[None]
) -> None:
    """Ask again and again, each answer right, until something is done."""
    work = None if callable(done) else asyncio.ensure_future(done)
    end = time.monotonic() + PATIENCE_SECONDS
    while not (done() if callable(done) else work is not None and work.done()):
        answers = await ask_all(served, max_tokens=NUM_TOKENS)
        assert [answer for answer, _ in answers] == expected
        assert time.monotonic() < end, "it did not come about"
    if work is not None:
        await work


def workers(served: Served, name: str) -> dict[str, float]:
    """The version each worker of a pool drafts with, of those that have drafted at all."""
    metrics = served.metrics()

    def by_worker(series: str) -> dict[str, float]:
        samples = [(dict(key), value) for key, value in metrics.get(series, {}).items()]
        return {key["replica"]: value for key, value in samples if key.get("pool") == name}

    exchanges = by_worker(EXCHANGES)
    return {
        worker: version
        for worker, version in by_worker("drafthouse_draft_version").items()
        if exchanges[worker]
    }


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, target_folder: Path, gateway: object
) -> Iterator[Served]:
    """An application of a kind, after the one before it has ended.

    shared   two engines and two workers with the target's own weights
    choice   an engine with two pools: a worker apart, and a coarser one beside the target
    """
    shared = pool(target_folder, "twins", num_replicas=2)
    beside = pool(target_folder, "beside", dtype="int8", placement="colocated")
    choice = {"kind": "choice", "drafters": [pool(target_folder, "apart"), beside]}
    drafter, num_targets = {"shared": (shared, 2), "choice": (choice, 1)}[request.param]
    config = parse_config(sections(target_folder, gateway, drafter, num_targets=num_targets))
    with application(config) as served:
        until(lambda: served.total("drafthouse_members", kind="target") == num_targets)
        until(lambda: served.total("drafthouse_members", kind="draft") == 2)
        yield served


@pytest.mark.parametrize("served", ["shared"], indirect=True)
async def test_a_pool_shared_by_two_engines_changes_its_weights_and_workers_under_load(
    served: Served, expected: list[Answer], target_folder: Path, tmp_path: Path
) -> None:
    """No token changes; who comes later has the pool's weights, not those configured."""
    await under_load(served, expected, lambda: len(workers(served, "twins")) == 2)
    await under_load(served, expected, swap_by_command("twins", target_folder))
    await under_load(served, expected, lambda: set(workers(served, "twins").values()) == {1.0})
    victim, _ = processes("ray::DraftWorker")
    answers = await ask_all(served, max_tokens=NUM_TOKENS, on_tokens=after_tokens(600, victim.kill))
    assert [answer for answer, _ in answers] == expected
    assert not psutil.pid_exists(victim.pid)
    scale("Draft", 3)
    await under_load(
        served, expected, lambda: [*workers(served, "twins").values()] == [1.0, 1.0, 1.0]
    )
    assert served.total("drafthouse_draft_swaps_total", pool="twins") == 1
    assert served.total("drafthouse_draft_rollbacks_total", pool="twins") == 0
    accepted = {dict(key)["replica"]: value for key, value in served.metrics()[ACCEPTED].items()}
    assert len(accepted) == 2
    assert min(accepted.values()) > 0
    other = make_checkpoint(tmp_path / "other", num_layers=2)
    with pytest.raises(ConfigurationError, match="num_layers: 2"):
        await asyncio.to_thread(swap, "twins", other)
    with pytest.raises(ConfigurationError, match="there is no draft pool 'cousins'"):
        await asyncio.to_thread(swap, "cousins", other)


@pytest.mark.parametrize("served", ["shared"], indirect=True)
async def test_worse_weights_are_taken_back_by_themselves(
    served: Served, expected: list[Answer], tmp_path: Path
) -> None:
    """Weights drawn anew guess nothing: the pool returns to what it had, and no token changed."""
    bad = make_checkpoint(tmp_path / "bad", num_layers=3, seed=99)
    before = await ask_all(served, max_tokens=NUM_TOKENS)
    assert await asyncio.to_thread(swap, "twins", bad) == 2
    await under_load(
        served,
        expected,
        lambda: served.total("drafthouse_draft_rollbacks_total", pool="twins") == 1,
    )
    trusted = {served.total("drafthouse_draft_pool_version", pool="twins")}
    assert trusted <= {0.0, 1.0}
    await under_load(served, expected, lambda: set(workers(served, "twins").values()) == trusted)
    after = await ask_all(served, max_tokens=NUM_TOKENS)
    rates = [
        sum(last.speculation.accepted for _, last in answers)
        / sum(last.speculation.drafted for _, last in answers)
        for answers in (before, after)
    ]
    assert min(rates) > 0.8


@pytest.mark.parametrize("served", ["choice"], indirect=True)
async def test_two_pools_at_once_one_of_them_beside_the_target(
    served: Served, expected: list[Answer]
) -> None:
    """Each sequence takes its drafts where they pay: from either pool, with the same tokens."""
    await under_load(
        served,
        expected,
        lambda: len(workers(served, "apart")) == len(workers(served, "beside")) == 1,
    )
    assert served.total(ACCEPTED) > 0
