"""Ports for whoever does not care which."""

import socket
from contextlib import closing

import pytest

from cluster.actors import ports
from cluster.actors.ports import UNGIVEN_PORTS, free_ports

HOST = "127.0.0.1"


def test_they_are_apart_and_none_is_given_by_the_system() -> None:
    """Anyone who connects is given a port, and a minute may pass until ours is listened on."""
    found = free_ports(HOST, 20)
    assert len(set(found)) == 20
    with closing(socket.create_server((HOST, 0))) as given:
        assert given.getsockname()[1] not in UNGIVEN_PORTS
    assert all(port in UNGIVEN_PORTS for port in found)


def test_one_that_is_listened_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over; where there is no other an error says so."""
    [port] = free_ports(HOST, 1)
    monkeypatch.setattr(ports, "UNGIVEN_PORTS", range(port, port + 1))
    assert free_ports(HOST, 1) == [port]
    with (
        closing(socket.create_server((HOST, port))),
        pytest.raises(OSError, match=f"no port from {port} to {port} is free"),
    ):
        free_ports(HOST, 1)
