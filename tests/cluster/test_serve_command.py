"""`drafthouse serve` as its user meets it: one line when ready, one line when not, nothing left."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
import yaml

from protos import inference_pb2, inference_pb2_grpc
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.cluster.harness import PROMPTS, message

pytestmark = [pytest.mark.ray, pytest.mark.wire]

COMMAND = Path(sys.executable).with_name("drafthouse")
READY = re.compile(r"^ready grpc=(\S+) http=(\S+)$")
END_SECONDS = 30.0


def config_file(folder: Path, model: Path, **sections: object) -> Path:
    """A configuration on disk."""
    path = folder / "config.yaml"
    sections = {"target": {"model": str(model), "max_model_len": 256}} | sections
    path.write_text(yaml.safe_dump({"name": "tiny"} | sections))
    return path


@contextmanager
def started(*options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process group of its own, as a shell would start it, and its gRPC address."""
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
            yield server, ready.group(1)
        finally:
            if server.poll() is None:
                server.kill()


def refused(*options: object) -> str:
    """What a server that must not start says."""
    done = subprocess.run(
        [COMMAND, "serve", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=120,
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
        answer = stub.Generate(message(PROMPTS[0], max_tokens=8))
        assert answer.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        return list(answer.token_ids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda it: it.name)
def test_it_answers_until_it_is_ended_and_leaves_nothing(
    target_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Ready means a token came out; Ctrl-C, which reaches the whole group, ends all of Ray."""
    config = config_file(tmp_path, target_folder)
    with started(config, "--grpc-port", 0, "--http-port", 0) as (server, address):
        assert len(ask(address)) == 8
        family = psutil.Process(server.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in family)
        if number == signal.SIGINT:
            os.killpg(server.pid, number)
        else:
            server.send_signal(number)
        assert server.wait(END_SECONDS) == 0
        _, alive = psutil.wait_procs(family, timeout=END_SECONDS)
        assert not alive


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
