"""`drafthouse serve` as its user meets it: one line when ready, one line when not, nothing left."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import trustme
import yaml

from cluster.actors import starting
from cluster.actors.machine import Machine
from cluster.actors.ports import free_ports
from cluster.actors.session import join
from cluster.config.keys import id_of
from cluster.errors import Unavailable
from cluster.tools.connection import Access, connected
from cluster.tools.keys import KeyOptions, create_key, revoke_key
from protos import inference_pb2, inference_pb2_grpc
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.cluster.harness import PROMPTS, message, until

pytestmark = [pytest.mark.ray, pytest.mark.wire]

COMMAND = Path(sys.executable).with_name("drafthouse")
READY = re.compile(r"^ready grpc=(\S+) http=(\S+)$")
END_SECONDS = 120.0


def config_file(folder: Path, model: Path, **sections: object) -> Path:
    """A configuration on disk."""
    path = folder / "config.yaml"
    sections = {"target": {"model": str(model), "max_model_len": 256}} | sections
    path.write_text(yaml.safe_dump({"name": "tiny"} | sections))
    return path


@contextmanager
def started(*options: object) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server in a process group of its own, as a shell would start it, and its addresses."""
    with subprocess.Popen(
        [COMMAND, "serve", *map(str, options)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        try:
            assert server.stdout is not None
            lines = (READY.match(line.strip()) for line in server.stdout)
            ready = next(filter(None, lines), None)
            assert ready is not None, "the server ended before it was ready"
            yield server, ready.group(1), ready.group(2)
        finally:
            if server.poll() is None:
                server.kill()


def refused(*options: object) -> str:
    """What a server that must not start says."""
    done = subprocess.run(
        [COMMAND, "serve", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "ready grpc=" not in done.stdout
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def ask(address: str) -> list[int]:
    """A short answer over gRPC."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        (answer,) = stub.Generate(message(PROMPTS[0], max_tokens=8)).answers
        assert answer.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        return list(answer.token_ids)


@contextmanager
def nothing_is_left_of(server: subprocess.Popen[str]) -> Iterator[None]:
    """What ends the server ends all of Ray, too."""
    family = psutil.Process(server.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    yield
    assert server.wait(END_SECONDS) == 0
    _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
    assert not alive


def test_it_answers_until_ctrl_c_and_leaves_nothing(target_folder: Path, tmp_path: Path) -> None:
    """Ready means a token came out; Ctrl-C reaches the whole group."""
    config = config_file(tmp_path, target_folder)
    with started(config, "--grpc-port", 0, "--http-port", 0) as (server, address, _):
        assert len(ask(address)) == 8
        with nothing_is_left_of(server):
            os.killpg(server.pid, signal.SIGINT)


def test_outside_the_machine_with_certificates_and_keys(
    target_folder: Path, tmp_path: Path
) -> None:
    """Everybody's interface: both ports speak TLS, and both ask for a key that still holds."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert("localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    files = {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.pem")}
    keys = tmp_path / "keys.yaml"
    key, other = (create_key(keys, tenant, KeyOptions()) for tenant in ("acme", "other"))
    gateway = {"host": "0.0.0.0", "tls": files, "keys": str(keys)}  # noqa: S104 - the case
    config = config_file(tmp_path, target_folder, gateway=gateway)
    with started(config, "--grpc-port", 0, "--http-port", 0) as (server, grpc_at, http_at):
        grpc_port, http_port = (it.rpartition(":")[2] for it in (grpc_at, http_at))
        access = Access(tls_ca=tmp_path / "ca.pem", api_key=key)
        with connected(f"localhost:{grpc_port}", access) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = message(PROMPTS[0], max_tokens=8)
            (answer,) = stub.Generate(request, metadata=access.metadata).answers
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Generate(request)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        with httpx.Client(base_url=f"https://localhost:{http_port}", verify=context) as http:
            assert http.get("/health").text == "SERVING\n"
            assert http.get("/metrics").status_code == 401
            ask_over_http = partial(
                http.post,
                "/v1/completions",
                json={"prompt": list(PROMPTS[0]), "max_tokens": 8, "temperature": 0.8, "seed": 0}
                | {"ignore_eos": True, "return_token_ids": True},
            )
            assert ask_over_http().status_code == 401
            said = ask_over_http(headers={"authorization": f"Bearer {key}"}).json()
            assert said["choices"][0]["token_ids"] == list(answer.token_ids)
            revoke_key(keys, id_of(key))
            until(
                lambda: ask_over_http(headers={"authorization": f"Bearer {key}"}).status_code == 401
            )
            assert ask_over_http(headers={"authorization": f"Bearer {other}"}).status_code == 200
        with nothing_is_left_of(server):
            server.terminate()


@pytest.mark.parametrize("field", ["tls", "keys"])
def test_files_of_no_use_are_named_before_anything_starts(
    target_folder: Path, tmp_path: Path, field: str
) -> None:
    """A wrong certificate or no file of keys: one line, and in a second."""
    absent = str(tmp_path / "absent")
    section = {"certificate": absent, "key": absent} if field == "tls" else absent
    config = config_file(tmp_path, target_folder, gateway={field: section})
    assert f"gateway.{field}: " in refused(config)


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
def test_a_port_that_is_taken_is_named(target_folder: Path, tmp_path: Path, option: str) -> None:
    """Two servers never share a port in silence: the second one is told which it was."""
    config = config_file(tmp_path, target_folder)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        ports = {"--grpc-port": 0, "--http-port": 0} | {option: port}
        said = refused(config, *(item for pair in ports.items() for item in pair))
    field = option.removeprefix("--").replace("-", "_")
    assert f"gateway.{field}: 127.0.0.1:{port} is taken" in said


def test_a_model_that_is_not_there_is_named() -> None:
    """A wrong reference is one line, before anything is started."""
    assert "nowhere.gguf" in refused("--target", "/nowhere.gguf")


def test_a_wrong_key_is_named(target_folder: Path, tmp_path: Path) -> None:
    """A typo in the configuration is an error that names the key."""
    config = config_file(tmp_path, target_folder, gateway={"grpc_prot": 1})
    assert "gateway.grpc_prot" in refused(config)


def test_x15_a_draft_of_another_vocabulary_is_refused(target_folder: Path, tmp_path: Path) -> None:
    """Other tokens under the same ids are found at start, and the first of them is named."""
    draft = make_checkpoint(tmp_path / "draft")
    make_tokenizer(draft, corpus=("quite other words make quite other merges",))
    said = refused(config_file(tmp_path, target_folder), "--draft", draft)
    assert re.search(r"differ first at token id \d+", said)


def test_what_only_the_engine_finds_is_one_line_too(target_folder: Path, tmp_path: Path) -> None:
    """An error inside an actor reaches the user as itself, not as a page of Ray."""
    target = {"model": str(target_folder), "max_model_len": 100_000, "num_blocks": 1}
    config = config_file(tmp_path, target_folder, target=target)
    said = refused(config, "--grpc-port", 0, "--http-port", 0)
    assert "target.max_model_len: 100000 is over the model's own 2048" in said


def test_a_cluster_that_runs_already_is_joined_and_left(
    target_folder: Path, tmp_path: Path
) -> None:
    """The application comes and goes; Serve stays, and who wants it to listen elsewhere is told."""
    (http_port,) = free_ports("127.0.0.1", 1)
    machine = starting.started(Machine)
    try:
        config = config_file(tmp_path, target_folder)
        options = (config, "--grpc-port", 0, "--address", machine.address, "--http-port")
        with started(*options, http_port) as (server, address, http):
            assert http == f"127.0.0.1:{http_port}"
            assert len(ask(address)) == 8
            health = f"http://{http}/health"
            assert httpx.get(health).text == "SERVING\n"
            said = refused(*options, http_port + 1)
            assert (
                f"gateway.http_port: on this Ray cluster Serve runs already, with {http_port}"
                in said
            )
            assert httpx.get(health).text == "SERVING\n"  # the other's is not touched
            server.terminate()
            assert server.wait(END_SECONDS) == 0
        assert httpx.get(health).status_code == 404
        assert "gateway.http_port: 0 is only" in refused(*options, 0)
    finally:
        machine.shutdown()


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:port"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    """A typing error in --address is one line."""
    with pytest.raises(Unavailable, match=f"no Ray cluster answers at {address}: "):
        join(address)


def test_an_address_where_nobody_listens_is_known_at_once() -> None:
    """Ray itself would knock for minutes, and tell the terminal of every time."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match=f"no Ray cluster answers at 127.0.0.1:{port}: "):
        join(f"127.0.0.1:{port}")
