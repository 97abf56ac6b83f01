"""A client's way to a server: over TLS or in plaintext, with a key or without."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from cluster.config.security import check_certificates, is_loopback
from cluster.errors import ConfigurationError, Unavailable

CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a client shows and expects. With `tls` alone the system's authorities are believed."""

    tls: bool = False
    tls_ca: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None
    api_key: str | None = None

    @property
    def speaks_tls(self) -> bool:
        """Whether it does so at all."""
        return self.tls or self.tls_ca is not None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)


@contextmanager
def connected(address: str, access: Access) -> Iterator[grpc.Channel]:
    """A channel that has reached the server. Raises Unavailable, and ConfigurationError.

    A key goes in plaintext to this machine only.
    """
    with _channel(address, access) as channel:
        ready = grpc.channel_ready_future(channel)
        try:
            ready.result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise Unavailable(_why_not(address, access)) from None
        yield channel


def credentials(address: str, access: Access) -> grpc.ChannelCredentials | None:
    """What a channel is made with; None for one in plaintext. Raises ConfigurationError."""
    if access.speaks_tls:
        _check_certificates(access)
        return grpc.ssl_channel_credentials(
            _read(access.tls_ca), _read(access.client_key), _read(access.client_certificate)
        )
    if access.client_certificate is not None or access.client_key is not None:
        raise ConfigurationError("--client-cert: certificates need TLS: --tls, or --tls-ca FILE")
    if access.api_key is not None and not is_loopback(_host(address)):
        raise ConfigurationError(
            f"--api-key: it is not sent to {address} in plaintext: --tls, or --tls-ca FILE"
        )
    return None


def _channel(address: str, access: Access) -> grpc.Channel:
    shown = credentials(address, access)
    if shown is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, shown)


def _check_certificates(access: Access) -> None:
    """Raises ConfigurationError; gRPC would not tell such files from a server that is away."""
    if (access.client_certificate is None) != (access.client_key is None):
        raise ConfigurationError("--client-cert: a certificate needs its --client-key, and it one")
    check_certificates("--tls-ca", authority=access.tls_ca)
    check_certificates(
        "--client-cert", certificate=access.client_certificate, key=access.client_key
    )


def _why_not(address: str, access: Access) -> str:
    """What keeps this client out, where gRPC says only that it is not in."""
    host, port = _host(address), address.rpartition(":")[2]
    try:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS) as plain:
            if not access.speaks_tls:
                return f"{address} answers no plaintext gRPC: --tls, or --tls-ca FILE?"
            context = ssl.create_default_context(cafile=access.tls_ca)
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {address} is not believed: {error.verify_message}"
    except ssl.SSLError:
        return f"{address} speaks no TLS"
    except (OSError, ValueError):
        return f"no server answers at {address}"
    return f"{address} ends the connection: does it ask for a --client-cert?"


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
