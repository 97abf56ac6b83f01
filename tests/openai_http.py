"""OpenAI's HTTP API over an engine in this process, without a socket or on a real one."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from cluster.messages import SamplingSpec
from cluster.metrics import GatewayMetrics
from cluster.models.reference import GenerationDefaults
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from deployments.answering import Answering
from deployments.auth import Authenticator
from deployments.openai_service import OpenAIService
from deployments.schemas import RequestReader
from tests.checkpoints import make_tokenizer
from tests.fakes import FakeModel
from tests.wire import EOS, Wire, served

MAX_BODY_BYTES = 2**18
TURNS = [{"role": "user", "content": "Hello"}]
# As Qwen's: the tools before the conversation, calls and results in tags.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class AnyPrompt(FakeModel):
    """Continues any prompt with `script`, then with EOS."""

    script: tuple[int, ...] = ()

    def next_token(self, state: int, position: int, sampling: SamplingSpec) -> int:
        """The script's token, whatever the prefix is."""
        del state
        place = position - sampling.num_prompt_tokens
        return self.script[place] if 0 <= place < len(self.script) else EOS


def tokenizer_with_tools(folder: Path, template: str = TOOL_TEMPLATE) -> Tokenizer:
    """A byte-level tokenizer whose chat template is this one."""
    make_tokenizer(folder, vocab_size=300)
    return load_tokenizer(with_template(folder, template))


def with_template(folder: Path, template: str = TOOL_TEMPLATE) -> Path:
    """The folder of a tokenizer, whose chat template is changed."""
    (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass
class Http:
    """A client of the API, and what is behind it."""

    client: httpx.AsyncClient
    wire: Wire
    metrics: CollectorRegistry

    async def chat(self, **fields: object) -> dict[str, Any]:
        """The whole answer to a conversation of one turn."""
        return await self.post("chat/completions", {"messages": TURNS} | fields)

    async def complete(self, **fields: object) -> dict[str, Any]:
        """The whole answer to a text."""
        return await self.post("completions", {"prompt": "abc"} | fields)

    async def post(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        """The body of an answer that is no error."""
        answer = await self.client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def stream(self, path: str = "chat/completions", **fields: object) -> list[Any]:
        """All chunks of a stream that ends as it should."""
        prompt = {"messages": TURNS} if path.startswith("chat") else {"prompt": "abc"}
        body = prompt | {"stream": True} | fields
        answer = await self.client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(answer.text)

    async def failure(self, path: str, body: object) -> tuple[int, dict[str, Any]]:
        """Status and error of an answer that is one."""
        answer = await self.client.post(f"/v1/{path}", json=body)
        return answer.status_code, answer.json()["error"]


def events(text: str) -> list[Any]:
    """The chunks of a stream of events, whose end is checked."""
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def service_of(
    wire: Wire, tokenizer: Tokenizer, registry: CollectorRegistry, authenticator: Authenticator
) -> OpenAIService:
    """The API over the engine that answers gRPC."""
    model = wire.backend.model
    reader = RequestReader(model, tokenizer, GenerationDefaults(eos_token_ids=frozenset({EOS})))
    return OpenAIService(
        Answering(wire.backend, tokenizer, GatewayMetrics(registry, model=model.name)),
        reader,
        authenticator,
        max_body_bytes=MAX_BODY_BYTES,
    )


def app_of(
    wire: Wire, tokenizer: Tokenizer, registry: CollectorRegistry, authenticator: Authenticator
) -> FastAPI:
    """An application of these routes alone."""
    app = FastAPI()
    service_of(wire, tokenizer, registry, authenticator).add_to(app)
    return app


@asynccontextmanager
async def http_over(
    wire: Wire, tokenizer: Tokenizer, authenticator: Authenticator | None = None
) -> AsyncIterator[Http]:
    """A client without a socket."""
    registry = CollectorRegistry()
    app = app_of(wire, tokenizer, registry, authenticator or Authenticator())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield Http(client, wire, registry)


@asynccontextmanager
async def http(
    tokenizer: Tokenizer,
    script: Sequence[int] = (),
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[Http]:
    """A client of an engine that says `script` to anything."""
    async with (
        served(tokenizer, script, model=AnyPrompt, **options) as wire,
        http_over(wire, tokenizer) as client,
    ):
        yield client


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """The application on a real socket: its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(0.005)
    try:
        [port] = {socket.getsockname()[1] for part in server.servers for socket in part.sockets}
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving
