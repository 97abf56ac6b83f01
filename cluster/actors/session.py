"""A Ray cluster for as long as a command runs: started here or joined, and the app on it."""

import importlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from cluster.actors.starting import started
from cluster.config import DrafthouseConfig, GatewayConfig
from cluster.errors import ConfigurationError, Unavailable

APP_NAME = "drafthouse"
IMPORT_PATH = "deployments.app:build_app"  # a name, as Serve itself takes it: deployments are above
OBJECT_STORE_BYTES = 256 * 2**20  # everything on the data path rides inline
POLL_SECONDS = 0.25
ANSWER_SECONDS = 10.0
KNOCK_SECONDS = 5.0
HTTP_OPTIONS = {  # of Serve, and what they are called here
    "host": "host",
    "port": "http_port",
    "ssl_certfile": "tls.certificate",
    "ssl_keyfile": "tls.key",
}
OUR_ERROR = re.compile(r"cluster\.errors\.\w+(?:\x1b\[\d+m)?: ([^\n]+)")


@contextmanager
def local_ray(num_cpus: int, gateway: GatewayConfig) -> Iterator[None]:
    """A Ray cluster of this process's own, which ends with it at once: nothing is left behind.

    `num_cpus` is what Ray may count with, not what there is.
    """
    started(
        lambda: ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
        )
    )
    try:
        _start_serve(gateway)
        yield
    finally:
        ray.shutdown()


@contextmanager
def joined_ray(address: str, gateway: GatewayConfig) -> Iterator[None]:
    """A Ray cluster that runs already; the application goes when this ends, Serve itself stays."""
    join(address)
    try:
        _start_serve(gateway)
        try:
            yield
        finally:
            with suppress(RayError, RayServeException):  # it never came up, or Ray is gone
                serve.delete(APP_NAME)  # streams under way are drained
    finally:
        ray.shutdown()


def join(address: str) -> None:
    """Make this process part of a Ray cluster that runs already. Raises Unavailable."""
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:  # away, of another version, no address
        raise Unavailable(f"no Ray cluster answers at {address}: {error}") from error


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


def _knock(address: str) -> None:
    """Raises OSError where nobody listens, which Ray itself would find out in minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()


def hush() -> None:
    """Leave to the session's log files what Ray and Serve have to say in this process."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _start_serve(gateway: GatewayConfig) -> None:
    hush()
    tls = gateway.tls
    certificates = (
        {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    )
    http = {"host": gateway.host, "port": gateway.http_port, **certificates}
    serve.start(
        http_options=http, logging_config={"log_level": "ERROR", "enable_access_log": False}
    )
    _check_http(http)


def _check_http(asked: dict[str, Any]) -> None:
    """Raises ConfigurationError where a Serve that ran already listens for HTTP in another way.

    It goes on doing so in silence: in plaintext, too, where certificates were asked for.
    """
    found = _get_global_client().http_config
    for option, field in HTTP_OPTIONS.items():
        there = getattr(found, option)
        if there != asked.get(option):
            raise ConfigurationError(
                f"gateway.{field}: on this Ray cluster Serve runs already, with {there!r}; "
                "say the same, or end it with `serve shutdown`"
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
