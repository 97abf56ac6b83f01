"""TLS and mutual TLS on the gRPC port, with certificates made here, over real sockets."""

import asyncio
import io
import logging
from pathlib import Path

import grpc
import pytest
import trustme
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from cluster.config.security import TlsConfig
from cluster.errors import ConfigurationError, Unavailable
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools import connection
from cluster.tools.chat import chat
from cluster.tools.connection import Access
from cluster.tools.keys import KeyOptions, create_key
from deployments.auth import Authenticator
from deployments.keys import KeyRing
from deployments.tls import read_certificates, server_credentials
from tests.checkpoints import make_tokenizer
from tests.wire import Door, request, served

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CALL_SECONDS = 60.0

Pair = tuple[bytes, bytes]  # key, certificate chain


class Files:
    """A certificate and its key where the server looks for them."""

    def __init__(
        self, folder: Path, ca: trustme.CA, *, client_ca: trustme.CA | None = None
    ) -> None:
        self.tls = TlsConfig(
            certificate=folder / "tls.crt",
            key=folder / "tls.key",
            client_ca=None if client_ca is None else folder / "ca.crt",
        )
        if self.tls.client_ca is not None and client_ca is not None:
            client_ca.cert_pem.write_to_path(self.tls.client_ca)
        self.issue(ca)

    def issue(self, ca: trustme.CA) -> None:
        """Put another certificate there."""
        key, chain = pair(ca)
        self.tls.key.write_bytes(key)
        self.tls.certificate.write_bytes(chain)


def pair(ca: trustme.CA) -> Pair:
    """A key and a certificate of localhost."""
    issued = ca.issue_cert("localhost")
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    return issued.private_key_pem.bytes(), chain


def trusting(ca: trustme.CA, own: Pair | None = None) -> grpc.ChannelCredentials:
    """A client that believes this authority, and shows a certificate of its own if it has one."""
    key, chain = own or (None, None)
    return grpc.ssl_channel_credentials(ca.cert_pem.bytes(), key, chain)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    """The authority that everyone believes."""
    return trustme.CA()


@pytest.fixture(scope="module")
def stranger() -> trustme.CA:
    """Another one."""
    return trustme.CA()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


async def answered(port: int, client: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """What a client with such credentials, or in plaintext, gets from health on a new connection.

    Health asks for no key: what it does not get is refused by TLS.
    """
    options = (("grpc.use_local_subchannel_pool", 1),)
    channel = (
        aio.insecure_channel(f"localhost:{port}", options=options)
        if client is None
        else aio.secure_channel(f"localhost:{port}", client, options=options)
    )
    async with channel:
        call = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS
        )
        return await call.code()


@pytest.mark.wire
async def test_x79_plaintext_to_a_tls_port(
    tokenizer: Tokenizer, tmp_path: Path, ca: trustme.CA, stranger: trustme.CA
) -> None:
    """The handshake fails, as it does for who does not believe the server; TLS clients go on."""
    door = Door(credentials=server_credentials(Files(tmp_path, ca).tls), client=trusting(ca))
    async with served(tokenizer, [65] * 3, door=door) as wire:
        for _ in range(3):
            assert await answered(wire.port, None) == UNAVAILABLE
            assert await answered(wire.port, trusting(stranger)) == UNAVAILABLE
            await wire.stub.Generate(request())
        assert await answered(wire.port, trusting(ca)) == grpc.StatusCode.OK


@pytest.mark.wire
async def test_mutual_tls_lets_in_whom_the_authority_signed(
    tokenizer: Tokenizer, tmp_path: Path, ca: trustme.CA, stranger: trustme.CA
) -> None:
    """No certificate, or one of a stranger's authority, is refused before any call."""
    door = Door(
        credentials=server_credentials(Files(tmp_path, ca, client_ca=ca).tls),
        client=trusting(ca, pair(ca)),
    )
    async with served(tokenizer, door=door) as wire:
        assert await answered(wire.port, trusting(ca)) == UNAVAILABLE
        assert await answered(wire.port, trusting(ca, pair(stranger))) == UNAVAILABLE
        assert await answered(wire.port, None) == UNAVAILABLE
        await wire.stub.Generate(request())
        assert len(wire.backend.requests) == 1


@pytest.mark.wire
async def test_certificates_are_read_again_under_load(
    tokenizer: Tokenizer,
    tmp_path: Path,
    ca: trustme.CA,
    stranger: trustme.CA,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """New connections see the new one; open ones go on; a broken pair leaves the last good one."""
    files = Files(tmp_path, ca)
    door = Door(credentials=server_credentials(files.tls), client=trusting(ca))
    async with served(tokenizer, [65] * 20, door=door) as wire:
        over = asyncio.Event()

        async def load() -> int:
            count = 0
            while not over.is_set():
                await wire.stub.Generate(request())
                count += 1
            return count

        loads = [asyncio.create_task(load()) for _ in range(3)]
        assert await answered(wire.port, trusting(ca)) == grpc.StatusCode.OK
        files.issue(stranger)
        assert await answered(wire.port, trusting(stranger)) == grpc.StatusCode.OK
        assert await answered(wire.port, trusting(ca)) == UNAVAILABLE
        with caplog.at_level(logging.ERROR):
            files.tls.key.write_bytes(pair(ca)[0])  # another certificate's
            for _ in range(3):
                assert await answered(wire.port, trusting(stranger)) == grpc.StatusCode.OK
        assert len(caplog.records) == 1
        files.issue(ca)
        assert await answered(wire.port, trusting(ca)) == grpc.StatusCode.OK
        over.set()
        assert min(await asyncio.gather(*loads)) > 0


@pytest.mark.wire
async def test_chat_goes_over_tls_with_certificate_and_key(
    tokenizer: Tokenizer, tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all it needs it is answered; a key is not sent elsewhere in plaintext."""
    key = create_key(tmp_path / "keys.yaml", "acme", KeyOptions())
    own_key, own_chain = pair(ca)
    ca_file, key_file, chain_file = (tmp_path / name for name in ("ca", "key", "chain"))
    ca.cert_pem.write_to_path(ca_file)
    key_file.write_bytes(own_key)
    chain_file.write_bytes(own_chain)
    door = Door(
        Authenticator(KeyRing(tmp_path / "keys.yaml")),
        credentials=server_credentials(Files(tmp_path, ca, client_ca=ca).tls),
        client=trusting(ca, pair(ca)),
    )
    access = Access(tls_ca=ca_file, client_certificate=chain_file, client_key=key_file, api_key=key)
    console = Console(file=io.StringIO(), highlight=False)

    async def talk(access: Access, port: int) -> None:
        await asyncio.to_thread(
            chat, f"localhost:{port}", once="hi", console=console, access=access
        )

    async with served(tokenizer, door=door) as wire:
        await talk(access, wire.port)
        assert wire.backend.requests[0].tenant == "acme"
        monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.5)
        with pytest.raises(Unavailable):
            await talk(Access(tls_ca=ca_file, api_key=key), wire.port)
    with pytest.raises(ConfigurationError, match="plaintext"):
        chat("10.0.0.1:50051", once="hi", access=Access(api_key=key))


def test_what_is_no_certificate_is_refused_at_the_start(
    tmp_path: Path, ca: trustme.CA, stranger: trustme.CA
) -> None:
    """A missing file, no PEM, the key of another; the error says so without the path."""
    files = Files(tmp_path, ca)
    files.tls.key.write_bytes(pair(stranger)[0])
    with pytest.raises(ConfigurationError, match=r"gateway\.tls: .*MISMATCH"):
        read_certificates(files.tls)
    files.tls.key.write_bytes(b"no key")
    with pytest.raises(ConfigurationError, match=r"gateway\.tls"):
        server_credentials(files.tls)
    files.tls.key.unlink()
    with pytest.raises(ConfigurationError, match="No such file"):
        server_credentials(files.tls)
