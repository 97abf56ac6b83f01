"""The section `gateway`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.config.base import Config, Resources
from cluster.config.security import TlsConfig, is_loopback
from cluster.errors import ConfigurationError


class GatewayConfig(Config):
    """Where clients knock, and what they must show. Port 0 takes any free port.

    `keys` is a file of `drafthouse keys`; without one nobody is asked for a key. Outside the
    machine itself both TLS and keys are needed, unless `insecure` says that something in front of
    the gateway sees to that. Left to `auto`, reflection
    is on, and metrics are open to everyone, on loopback only.
    """

    host: str = "127.0.0.1"
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    http_port: int = Field(default=8000, ge=0, le=65535)
    num_replicas: int = Field(default=1, ge=1)
    max_message_bytes: int = Field(default=8 * 2**20, ge=1024)
    drain_seconds: float = Field(default=120.0, gt=0)
    tls: TlsConfig | None = None
    keys: Path | None = None
    insecure: bool = False
    reflection: Literal["auto", "on", "off"] = "auto"
    metrics: Literal["auto", "open", "key"] = "auto"
    resources: Resources = Field(default_factory=lambda: {"CPU": 0.2})

    @property
    def reflects(self) -> bool:
        """Whether the gRPC server describes itself."""
        return is_loopback(self.host) if self.reflection == "auto" else self.reflection == "on"

    @property
    def metrics_need_key(self) -> bool:
        """Whether the page of metrics is for those with a key only."""
        if self.metrics == "auto":
            return self.keys is not None and not is_loopback(self.host)
        return self.metrics == "key"

    def check_exposure(self) -> None:
        """Raises ConfigurationError when others than this machine could listen in or come in."""
        if self.metrics == "key" and self.keys is None:
            raise ConfigurationError("gateway.metrics: there are no gateway.keys to ask for")
        if is_loopback(self.host) or self.insecure:
            return
        if self.tls is None:
            raise ConfigurationError(
                f"gateway.tls: {self.host} is reached from outside this machine, and without TLS "
                "everyone on the way reads along: set gateway.tls.certificate and gateway.tls.key, "
                "or say gateway.insecure: true (--insecure) where a proxy in front does TLS"
            )
        if self.keys is None:  # certificates of clients are asked for over gRPC only
            raise ConfigurationError(
                f"gateway.keys: {self.host} is reached from outside this machine, and everyone "
                "would be served: make keys with `drafthouse keys create` and name their file in "
                "gateway.keys, or say gateway.insecure: true (--insecure)"
            )
