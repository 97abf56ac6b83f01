"""Who may reach the gateway, and how: certificates, keys, and what is open outside the machine."""

import ssl
from ipaddress import ip_address
from pathlib import Path

from cluster.config.base import Config
from cluster.errors import ConfigurationError


class TlsConfig(Config):
    """PEM files, read again by the gRPC server when they change.

    With `client_ca` only gRPC clients whose certificates it has signed get in. HTTP has the same
    certificate where `drafthouse serve` starts Ray itself, and reads it at the start only.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


def check_certificates(
    what: str,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
) -> None:
    """Raises ConfigurationError that begins with `what` when such files are of no use.

    A certificate needs the key that it was made for, and nobody is there to unlock one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key, password="")
        if authority is not None:
            context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise ConfigurationError(f"{what}: cannot be used: {reason}") from None


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
