"""Ports to listen on, chosen or checked before anything listens there."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from cluster.errors import ConfigurationError

UNGIVEN_PORTS = range(20_000, 32_768)  # above Ray's, below those that a system gives to anyone


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on, nor is given: they are still free a minute later.

    Raises OSError when there are none.
    """
    found: list[int] = []
    with ExitStack() as probes:
        for port in random.sample(UNGIVEN_PORTS, len(UNGIVEN_PORTS)):
            with suppress(OSError):
                found.append(probes.enter_context(_listening(host, port)))
            if len(found) == count:
                return found
    raise OSError(f"no port from {UNGIVEN_PORTS[0]} to {UNGIVEN_PORTS[-1]} is free on {host}")


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
