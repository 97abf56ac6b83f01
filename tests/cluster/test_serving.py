"""The whole application with a tiny target: the same tokens whatever dies meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from protos import inference_pb2
from tests.cluster.harness import (
    NUM_TOKENS,
    PROMPTS,
    Answer,
    Served,
    after_tokens,
    application,
    ask,
    ask_all,
    client,
    kill,
    make_config,
    message,
    until,
)

pytestmark = [pytest.mark.ray, pytest.mark.wire]

COUNTERS = (
    "drafthouse_spec_decode_num_drafts_total",
    "drafthouse_spec_decode_num_draft_tokens_total",
    "drafthouse_spec_decode_num_accepted_tokens_total",
    "drafthouse_spec_decode_num_accepted_tokens_per_pos_total",
    "drafthouse_engine_tokens_total",
    "drafthouse_generation_tokens_total",
    "drafthouse_prompt_tokens_total",
    "drafthouse_requests_total",
    "drafthouse_drafter_unavailable_total",
)


@pytest.fixture(scope="module")
def served(target_folder: Path, expected: list[Answer]) -> Iterator[Served]:
    """The application with n-gram drafts."""
    del expected  # computed before Ray takes the cores
    with application(make_config(target_folder)) as served:
        yield served


async def same(served: Served, expected: list[Answer], on_tokens: object = None) -> None:
    """All streams at once equal what the engine alone says, bit for bit."""
    answers = await ask_all(served, max_tokens=NUM_TOKENS, on_tokens=on_tokens or (lambda _: None))
    assert [answer for answer, _ in answers] == expected


def test_x61_every_series_is_there_before_the_first_request(served: Served) -> None:
    """A rate over a counter is never a gap, and a name with a space is a label like any other."""
    series = served.metrics()
    for name in COUNTERS:
        assert series[name], name
        for labels in series[name]:
            assert dict(labels)["model"] == "tiny model"
    assert served.total("drafthouse_generation_tokens_total") == 0
    assert served.total("drafthouse_spec_decode_num_draft_tokens_total") == 0


async def test_streams_are_the_engines_own_to_the_last_bit(
    served: Served, expected: list[Answer]
) -> None:
    """Through Ray and gRPC, 8 at once and with drafts: equal token ids and logprobs."""
    await same(served, expected)


def test_x61_counters_agree_with_each_other_and_with_the_answers(served: Served) -> None:
    """One page of all processes: positions sum to accepted, and usage to what was delivered."""
    series = served.metrics()
    processes = {dict(labels)["process"] for name in series for labels in series[name]}
    assert processes == {"gateway", "target", "router"}
    accepted = served.total("drafthouse_spec_decode_num_accepted_tokens_total")
    assert accepted == served.total("drafthouse_spec_decode_num_accepted_tokens_per_pos_total")
    assert 0 < accepted <= served.total("drafthouse_spec_decode_num_draft_tokens_total")
    assert served.total("drafthouse_generation_tokens_total") == len(PROMPTS) * NUM_TOKENS
    assert served.total("drafthouse_prompt_tokens_total") == sum(map(len, PROMPTS))
    assert served.total("drafthouse_requests_total", outcome="length") == len(PROMPTS)


def test_health_says_serving(served: Served) -> None:
    """HTTP and gRPC say the same."""
    assert served.get("/health") == (200, "SERVING\n")


async def test_a_chat_over_http_is_grpcs_answer(served: Served) -> None:
    """Through Serve's proxy, streamed by OpenAI's client: the same tokens, text and usage.

    Aborted in the middle, and before its first token is there, it frees its sequence.
    """
    turns: Any = [{"role": "user", "content": "Say something."}]
    grpc_message = inference_pb2.GenerateRequest(
        messages=turns,
        sampling=inference_pb2.Sampling(temperature=0.8, seed=5),
        stopping=inference_pb2.Stopping(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    async with client(served) as stub:
        whole = await stub.Generate(grpc_message)
    [expected] = whole.answers
    body: Any = {
        "model": "tiny model",
        "messages": turns,
        "temperature": 0.8,
        "seed": 5,
        "stream": True,
    }
    extra = {"ignore_eos": True, "return_token_ids": True}
    address = f"http://{served.http}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as http:
        stream = await http.chat.completions.create(
            **body,
            max_tokens=NUM_TOKENS,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        *chunks, last = [chunk.to_dict() async for chunk in stream]
        parts: list[Any] = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]
        assert [token for part in parts for token in part["token_ids"]] == expected.token_ids
        assert "".join(part["delta"].get("content", "") for part in parts) == expected.text
        assert last["usage"]["completion_tokens"] == NUM_TOKENS  # type: ignore[index]
        aborted = served.total("drafthouse_requests_total", outcome="abort")
        leaving = await http.chat.completions.create(**body, max_tokens=900, extra_body=extra)
        await anext(aiter(leaving))
        await leaving.close()
        impatient = http.with_options(timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            await impatient.completions.create(
                model="tiny model", prompt="a", max_tokens=1000, extra_body={"ignore_eos": True}
            )
    until(lambda: served.total("drafthouse_sequences") == 0)
    until(lambda: served.total("drafthouse_requests_total", outcome="abort") == aborted + 2)


async def test_x70_a_client_that_goes_away_frees_its_sequence(served: Served) -> None:
    """Cancel and deadline reach the engine through gateway and stream."""
    aborted = served.total("drafthouse_requests_total", outcome="abort")
    async with client(served) as stub:
        call = stub.GenerateStream(message(PROMPTS[0], max_tokens=900))
        await call.read()
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Generate(message(PROMPTS[1], max_tokens=900), timeout=0.3)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: served.total("drafthouse_sequences") == 0)
    until(lambda: served.total("drafthouse_requests_total", outcome="abort") == aborted + 2)


async def test_refusals_have_their_status(served: Served) -> None:
    """What the engine or the gateway refuses arrives as the caller's fault, naming the field."""
    async with client(served) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(stub, message([3] * 1024))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_routers_death_changes_nothing(served: Served, expected: list[Answer]) -> None:
    """Running requests, new requests and health go on without it, and it comes back."""
    await same(
        served,
        expected,
        after_tokens(100, lambda: kill("ray::ServeReplica:drafthouse:Router")),
    )
    await same(served, expected)
    assert served.get("/health")[0] == 200
    until(lambda: served.total("drafthouse_router_registrations_total") > 0)
    await same(served, expected)


async def test_x72_an_engines_death_is_a_pause(served: Served, expected: list[Answer]) -> None:
    """Killed in the middle of 8 streams: each goes on at the replacement, exactly."""
    await same(served, expected, after_tokens(1000, lambda: kill("ray::EngineActor")))
    await same(served, expected)


async def test_x72_a_supervisors_death_is_a_pause(served: Served, expected: list[Answer]) -> None:
    """Its engine dies with it, and both come again."""
    await same(
        served,
        expected,
        after_tokens(1000, lambda: kill("ray::ServeReplica:drafthouse:Target")),
    )
    await same(served, expected)


async def test_a_gateway_that_died_is_back_on_its_port(
    served: Served, expected: list[Answer]
) -> None:
    """Its streams break, which clients are told at once; new ones find it where it was."""
    async with client(served) as stub:
        call = stub.GenerateStream(message(PROMPTS[0], max_tokens=1000))
        await call.read()
        kill("ray::ServeReplica:drafthouse:Gateway")
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    until(lambda: served.get("/health")[0] == 200)
    until(lambda: served.total("drafthouse_sequences") == 0)
    await same(served, expected)
