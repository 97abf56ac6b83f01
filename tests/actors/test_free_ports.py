"""Ports for whoever does not care which."""

import socket
from contextlib import closing

import pytest

from cluster.actors import session

HOST = "127.0.0.1"


def test_they_are_apart_and_none_is_given_by_the_system() -> None:
    """Anyone who connects is given a port, and a minute may pass until ours is listened on."""
    found = session.free_ports(HOST, 20)
    assert len(set(found)) == 20
    with closing(socket.create_server((HOST, 0))) as given:
        assert given.getsockname()[1] not in session.UNGIVEN_PORTS
    assert all(port in session.UNGIVEN_PORTS for port in found)


def test_one_that_is_listened_on_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over; where there is no other an error says so."""
    [port] = session.free_ports(HOST, 1)
    monkeypatch.setattr(session, "UNGIVEN_PORTS", range(port, port + 1))
    assert session.free_ports(HOST, 1) == [port]
    with (
        closing(socket.create_server((HOST, port))),
        pytest.raises(OSError, match=f"no port from {port} to {port} is free"),
    ):
        session.free_ports(HOST, 1)
