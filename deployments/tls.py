"""The gateway's certificates, presented anew as soon as their files have changed."""

import grpc

from cluster.config.security import TlsConfig, check_certificates
from cluster.errors import ConfigurationError
from deployments.watched import Watched

Certificates = grpc.ServerCertificateConfiguration


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials that look at their files at every handshake.

    Connections that are open stay as they are. Raises ConfigurationError when the files are no
    certificate and its key.
    """
    paths = [tls.certificate, tls.key, *([tls.client_ca] if tls.client_ca else [])]
    files = Watched(paths, lambda: read_certificates(tls))

    def changed() -> Certificates | None:
        return files.value if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        files.value,
        changed,  # type: ignore[arg-type]  # None means: as before
        require_client_authentication=tls.client_ca is not None,
    )


def read_certificates(tls: TlsConfig) -> Certificates:
    """What the files hold. Raises ConfigurationError, also for a key of another certificate."""
    check_certificates(
        "gateway.tls", certificate=tls.certificate, key=tls.key, authority=tls.client_ca
    )
    try:
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read_bytes(), tls.certificate.read_bytes())],
            root_certificates=tls.client_ca.read_bytes() if tls.client_ca else None,
        )
    except OSError as error:  # they were there a moment ago
        raise ConfigurationError(f"gateway.tls: cannot be used: {error.strerror}") from None
