"""What the `drafthouse` command says of input that it cannot use."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from typer.testing import CliRunner

from cluster.cli import _grammar, app, one_line
from cluster.config import load_config
from cluster.errors import ConfigurationError, Unavailable
from cluster.tools import connection
from cluster.tools.connection import Access, connected


def test_an_error_is_one_line_and_keeps_its_brackets() -> None:
    """Words of other programs have line ends, and what a terminal could take for markup."""
    error = ConfigurationError("model '[red]/x': could not\nbe fetched:\n\n  [Errno -2] no name")
    said = one_line(error)
    assert said.plain == "error: model '[red]/x': could not be fetched: [Errno -2] no name"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"a: [", "is no YAML"),
        (b"- a", "the whole: "),
    ],
    ids=["absent", "binary", "broken", "list"],
)
def test_a_configuration_that_cannot_be_read(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    """Whatever is wrong with the file is a ConfigurationError."""
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        load_config(path)


def test_a_schema_that_is_no_text(tmp_path: Path) -> None:
    """It is named, as an error in the schema itself is."""
    path = tmp_path / "schema.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"--json-schema: .*schema\.json"):
        _grammar(path, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("tls_ca",), "--tls-ca: "),
        (("client_certificate", "client_key"), "--client-cert: "),
        (("client_certificate",), "needs its --client-key"),
        (("client_key",), "needs its --client-key"),
    ],
    ids=["authority", "own", "no key", "no certificate"],
)
def test_certificates_that_cannot_be_used(
    tmp_path: Path, fields: tuple[str, ...], said: str
) -> None:
    """They are told from a server that does not answer, before one is asked."""
    path = tmp_path / "some.pem"
    path.write_text("no certificate")
    access = Access(tls=True, **dict.fromkeys(fields, path))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=said), connected("127.0.0.1:1", access):
        pass


@pytest.mark.wire
@pytest.mark.parametrize(
    ("access", "said"),
    [
        (Access(), "answers no plaintext gRPC: --tls, or --tls-ca FILE?"),
        (Access(tls=True), "is not believed: unable to get local issuer certificate"),
    ],
    ids=["plaintext", "unknown authority"],
)
def test_why_a_client_stays_outside(
    monkeypatch: pytest.MonkeyPatch, access: Access, said: str
) -> None:
    """A server that is there is told from one that is not, and what it is that does not fit."""
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 1.0)
    issued = trustme.CA().issue_cert("localhost")
    credentials = grpc.ssl_server_credentials(
        [(issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())]
    )
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        with pytest.raises(Unavailable, match=said), connected(f"localhost:{port}", access):
            pass
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "ngram", "--out"],
        ["tune", "ngram", "--out", "here", "--save-answers"],
        ["profile", "--png"],
        ["bench", "control", "--report"],
        ["compare-drafts", "--draft", "ngram", "--report"],
    ],
    ids=" ".join,
)
def test_where_nothing_can_be_written_is_said_before_the_work(
    tmp_path: Path, arguments: list[str]
) -> None:
    """An hour's measurements are not lost to a typing error."""
    result = CliRunner().invoke(app, [*arguments, str(tmp_path / "absent" / "file")])
    assert result.exit_code == 2
    assert "is no folder" in " ".join(result.output.replace("\u2502", " ").split())
