"""The readiness probe of gateways with TLS, against a real server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deployments.grpc_probe import serving

pytestmark = pytest.mark.wire

STATUS = health_pb2.HealthCheckResponse.ServingStatus


@contextmanager
def served(status: int, credentials: grpc.ServerCredentials | None) -> Iterator[str]:
    """A server of that status."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if credentials is None:
        port = server.add_insecure_port("localhost:0")
    else:
        port = server.add_secure_port("localhost:0", credentials)
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(grace=None).wait()


def pem(authority: trustme.CA, folder: Path) -> Path:
    """The authority's certificate on disk."""
    folder.mkdir(exist_ok=True)
    authority.cert_pem.write_to_path(folder / "ca.crt")
    return folder / "ca.crt"


@pytest.mark.parametrize(
    ("status", "expected"), [(STATUS.SERVING, True), (STATUS.NOT_SERVING, False)]
)
def test_it_says_what_the_server_says(tmp_path: Path, status: int, expected: bool) -> None:  # noqa: FBT001
    """With TLS and without; a server that is not there does not serve."""
    authority = trustme.CA()
    certificate = authority.issue_cert("drafthouse-grpc")
    key, chain = certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()
    credentials = grpc.ssl_server_credentials([(key, chain)])
    with served(status, credentials) as address:
        ca = pem(authority, tmp_path)
        assert serving(address, ca=ca, server_name="drafthouse-grpc") is expected
    with served(status, None) as address:
        assert serving(address) is expected
    assert not serving(address)


def test_it_trusts_nobody_else(tmp_path: Path) -> None:
    """Another authority's certificate, or another name, is no answer."""
    authority = trustme.CA()
    certificate = authority.issue_cert("drafthouse-grpc")
    key, chain = certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()
    with served(STATUS.SERVING, grpc.ssl_server_credentials([(key, chain)])) as address:
        ours, theirs = pem(authority, tmp_path / "a"), pem(trustme.CA(), tmp_path / "b")
        assert serving(address, ca=ours, server_name="drafthouse-grpc")
        assert not serving(address, ca=ours, server_name="drafthouse-http")
        assert not serving(address, ca=theirs, server_name="drafthouse-grpc")
