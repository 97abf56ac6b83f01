"""The whole application with a tiny target: the same tokens whatever dies meanwhile."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

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
from tests.conformance.test_openai_client import COLOUR, TOOLS, check_call
from tests.openai_http import with_template

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


EOS = 2
TURNS: Any = [{"role": "user", "content": "Say something."}]
MODEL: Any = {"model": "tiny model"}
SAMPLED: Any = MODEL | {"temperature": 0.8, "seed": 5, "max_tokens": 48}
COLOURED: Any = MODEL | {
    "messages": TURNS,
    "seed": 1,
    "temperature": 1,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": COLOUR, "strict": True},
    },
}


@pytest.fixture(scope="module")
def served(
    target_folder: Path, expected: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The application with n-gram drafts; its target's chat template takes tools."""
    del expected  # computed before Ray takes the cores
    folder = tmp_path_factory.mktemp("tools") / "target"
    shutil.copytree(target_folder, folder)
    with application(make_config(with_template(folder))) as served:
        yield served


def openai_client(served: Served) -> openai.AsyncOpenAI:
    """OpenAI's own, of Serve's proxy."""
    base_url = f"http://{served.http}/v1"
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)


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
    grpc_message = inference_pb2.GenerateRequest(
        messages=TURNS,
        sampling=inference_pb2.Sampling(temperature=0.8, seed=5),
        stopping=inference_pb2.Stopping(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    async with client(served) as stub:
        whole = await stub.Generate(grpc_message)
    [expected] = whole.answers
    body: Any = MODEL | {"messages": TURNS, "temperature": 0.8, "seed": 5, "stream": True}
    extra = {"ignore_eos": True, "return_token_ids": True}
    async with openai_client(served) as http:
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


async def test_a_chats_logprobs_are_grpcs_to_the_last_bit(served: Served) -> None:
    """Whole and streamed: the same tokens, their logprobs, the best others' and the usage."""
    grpc_message = inference_pb2.GenerateRequest(
        messages=TURNS,
        sampling=inference_pb2.Sampling(temperature=0.8, seed=5),
        stopping=inference_pb2.Stopping(max_tokens=48),
        logprobs=True,
        top_logprobs=3,
    )
    async with client(served) as stub:
        whole = await stub.Generate(grpc_message)
    [expected] = whole.answers
    asked: Any = SAMPLED | {"messages": TURNS, "logprobs": True, "top_logprobs": 3}
    async with openai_client(served) as http:
        answer = await http.chat.completions.create(**asked)
        stream = await http.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
    [choice] = answer.choices
    parts = [chunk.choices[0] for chunk in chunks]
    assert choice.message.content == expected.text
    assert "".join(part.delta.content or "" for part in parts) == expected.text
    assert choice.finish_reason == parts[-1].finish_reason
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
    assert choice.logprobs is not None
    assert choice.logprobs.content == streamed
    assert [entry.logprob for entry in streamed] == list(expected.logprobs)
    assert [[other.logprob for other in entry.top_logprobs] for entry in streamed] == [
        list(top.logprobs) for top in expected.top_logprobs
    ]
    for usage in (answer.usage, last.usage):
        assert usage is not None
        assert usage.completion_tokens == len(expected.token_ids)
        assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_completion_is_the_same_whole_and_streamed(served: Served) -> None:
    """The older API: several answers, each with its logprobs, in whatever pieces they come."""
    asked: Any = SAMPLED | {"prompt": "A draft", "n": 3, "logprobs": 2}
    async with openai_client(served) as http:
        answer = await http.completions.create(**asked)
        stream = await http.completions.create(**asked, stream=True)
        pieces = [choice async for chunk in stream for choice in chunk.choices]
        echoed = await http.completions.create(**SAMPLED, prompt="A draft", echo=True)
    assert len({choice.text for choice in answer.choices}) == 3
    assert echoed.choices[0].text == "A draft" + answer.choices[0].text
    for choice in answer.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [
            logprob
            for piece in own
            if piece.logprobs
            for logprob in piece.logprobs.token_logprobs or ()
        ]


async def test_json_is_what_the_schema_allows(served: Served) -> None:
    """Of a random model, whole and streamed, with drafts and without: the same valid text."""
    async with openai_client(served) as http:
        answer = await http.chat.completions.create(**COLOURED, n=3)
        plain = await http.chat.completions.create(
            **COLOURED, n=3, extra_body={"speculation": {"enabled": False}}
        )
        stream = await http.chat.completions.create(**COLOURED, stream=True)
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
    texts = [choice.message.content or "" for choice in answer.choices]
    assert texts == [choice.message.content for choice in plain.choices]
    assert "".join(streamed) == texts[0]
    for text in texts:
        said = json.loads(text)
        assert said.keys() == {"colour", "warm"}
        assert said["colour"] in {"red", "green"}


async def test_tool_calls_are_valid_and_their_results_are_taken(served: Served) -> None:
    """Of one name, or any, whole and streamed; and the conversation goes on with what they gave."""
    asked: Any = MODEL | {"messages": TURNS, "tools": TOOLS, "temperature": 1, "seed": 2}
    named: Any = {"type": "function", "function": {"name": "paint"}}
    one: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    async with openai_client(served) as http:
        answer = await http.chat.completions.create(**asked, tool_choice=named)
        [painted] = answer.choices[0].message.tool_calls or []
        answer = await http.chat.completions.create(**asked, **one)
        [call] = answer.choices[0].message.tool_calls or []
        async with http.chat.completions.stream(**asked, **one) as stream:
            final = await stream.get_final_completion()
        [streamed] = final.choices[0].message.tool_calls or []
        result = {"role": "tool", "tool_call_id": painted.id, "content": "done"}
        turns: Any = [*TURNS, {"role": "assistant", "tool_calls": [painted.to_dict()]}, result]
        last = await http.chat.completions.create(**SAMPLED, messages=turns)
    for each in (painted, call, streamed):
        check_call(each)
    assert isinstance(painted, ChatCompletionMessageFunctionToolCall)
    assert painted.function.name == "paint"
    assert answer.choices[0].finish_reason == "tool_calls"
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    assert last.choices[0].message.content


async def test_x70_a_client_that_goes_away_frees_its_sequence(served: Served) -> None:
    """Cancel and deadline reach the engine through gateway and stream.

    The late one never says EOS, which nobody knows beforehand: else it would be refused at once.
    """
    aborted = served.total("drafthouse_requests_total", outcome="abort")
    endless = message(PROMPTS[1], max_tokens=900)
    endless.stopping.ignore_eos = False
    endless.sampling.banned_token_ids.append(EOS)
    async with client(served) as stub:
        call = stub.GenerateStream(message(PROMPTS[0], max_tokens=900))
        await call.read()
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Generate(endless, timeout=0.3)
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
