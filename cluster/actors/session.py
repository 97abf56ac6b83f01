"""A Ray cluster for as long as a command runs: started here or joined, and the app on it."""

import importlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from cluster.config import DrafthouseConfig, GatewayConfig
from cluster.errors import ConfigurationError, Unavailable

APP_NAME = "drafthouse"
IMPORT_PATH = "deployments.app:build_app"  # a name, as Serve itself takes it: deployments are above
OBJECT_STORE_BYTES = 256 * 2**20  # everything on the data path rides inline
POLL_SECONDS = 0.25
ANSWER_SECONDS = 10.0
OUR_ERROR = re.compile(r"cluster\.errors\.\w+(?:\x1b\[\d+m)?: ([^\n]+)")


@contextmanager
def local_ray(num_cpus: int, gateway: GatewayConfig) -> Iterator[None]:
    """A Ray cluster of this process's own, which ends with it at once: nothing is left behind.

    `num_cpus` is what Ray may count with, not what there is.
    """
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        _start_serve(gateway)
        yield
    finally:
        ray.shutdown()


@contextmanager
def joined_ray(address: str, gateway: GatewayConfig) -> Iterator[None]:
    """A Ray cluster that runs already; the application goes when this ends, Serve itself stays."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise Unavailable(f"no Ray cluster answers at {address}: {error}") from error
    try:
        _start_serve(gateway)
        yield
    finally:
        with suppress(RayError, RayServeException):  # it never came up, or Ray is gone
            serve.delete(APP_NAME)  # streams under way are drained
        ray.shutdown()


def deploy(config: DrafthouseConfig) -> DeploymentHandle:
    """Put the application on the cluster; returns the gateway, which may not be up yet."""
    module, _, attribute = IMPORT_PATH.partition(":")
    build_app = getattr(importlib.import_module(module), attribute)
    target = serve.RunTarget(
        target=build_app(config.model_dump(mode="json")), name=APP_NAME, route_prefix="/"
    )
    [gateway] = serve.run_many([target], wait_for_applications_running=False)
    return gateway


def await_ready(gateway: DeploymentHandle, *, progress: Callable[[str], None]) -> int:
    """Return the gRPC port once the gateway takes requests; tell meanwhile what is awaited.

    What `progress` raises ends the wait: it is called often, and between calls of Ray.
    Raises ConfigurationError with the reason when the application cannot start.
    """
    while not _running(progress):
        time.sleep(POLL_SECONDS)
    while not _answer(gateway.ready.remote()):
        progress("waiting for the first token")
        time.sleep(POLL_SECONDS)
    return cast("int", _answer(gateway.grpc_port.remote()))


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on."""
    with ExitStack() as probes:
        return [probes.enter_context(_listening(host, 0)) for _ in range(count)]


def check_free(host: str, port: int, *, field: str) -> None:
    """Raises ConfigurationError when somebody listens on the port."""
    try:
        with _listening(host, port):
            pass
    except OSError as error:
        raise ConfigurationError(f"{field}: {host}:{port} is taken ({error.strerror})") from error


@contextmanager
def _listening(host: str, port: int) -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as probe:
        yield probe.getsockname()[1]


def _start_serve(gateway: GatewayConfig) -> None:
    for name in ("ray", "ray.serve"):  # what they have to say is in the session's log files
        logging.getLogger(name).setLevel(logging.CRITICAL)
    serve.start(
        http_options={"host": gateway.host, "port": gateway.http_port},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )


def _running(progress: Callable[[str], None]) -> bool:
    """Whether every deployment is up. Raises ConfigurationError when one cannot come up."""
    app = serve.status().applications[APP_NAME]
    messages = [app.message, *(deployment.message for deployment in app.deployments.values())]
    for message in messages:
        if match := OUR_ERROR.search(message):
            raise ConfigurationError(match.group(1).strip())
    if app.status in {ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY}:
        raise ConfigurationError(_last_line(messages))
    missing = [
        name for name, deployment in app.deployments.items() if deployment.status.value != "HEALTHY"
    ]
    progress(f"starting {', '.join(missing).lower() or 'the deployments'}")
    return app.status is ApplicationStatus.RUNNING


def _last_line(messages: list[str]) -> str:
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return next((line for line in reversed(lines) if line), "the application did not start")


def _answer(response: Any) -> Any:  # noqa: ANN401 - whatever the deployment's method returns
    """What a deployment answers; None while it does not."""
    with suppress(TimeoutError, RayError, RayServeException):
        return response.result(timeout_s=ANSWER_SECONDS)
    return None
