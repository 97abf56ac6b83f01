"""What comes beside the tokens: top logprobs, the prompt's, cached tokens, steps, and failures.

The deltas are the test's own, so that every number has one place it can have come from.
"""

from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import pytest
from grpc import aio

from cluster.messages import TokenDelta
from cluster.request import FinishReason, Request
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.harness import series
from tests.wire import NUM_PROMPT, Answer, Wire, request, served

pytestmark = pytest.mark.wire

TEXT = "xyz{}qq"
PROMPT_LOGPROBS = (-1.5, -2.5)
LENGTH = inference_pb2.FINISH_REASON_LENGTH
STOP = inference_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: a token of ASCII is a character."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=259))


def deltas_of(request: Request, token_ids: Sequence[int], sizes: Sequence[int]) -> list[TokenDelta]:
    """All that the request asks for, in runs of `sizes` tokens, each of two steps if it can be."""
    deltas, start = [], 0
    for size in sizes:
        run = range(start, start + size)
        start += size
        deltas.append(
            TokenDelta(
                request_id=request.request_id,
                token_ids=tuple(token_ids[place] for place in run),
                logprobs=tuple(-float(place) for place in run) if request.logprobs else (),
                top_logprobs=tuple(
                    tuple((rank, -place - rank / 100) for rank in range(request.top_logprobs))
                    for place in run
                    if request.top_logprobs
                ),
                prompt_logprobs=(PROMPT_LOGPROBS if request.prompt_logprobs and not deltas else ()),
                num_cached_tokens=2 if not deltas else 0,
                num_steps=min(2, size),
                num_drafted=size,
                num_accepted=size - min(2, size),
                finish_reason=FinishReason.LENGTH if start == len(token_ids) else None,
            )
        )
    return deltas


def scripted(
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    deltas: Callable[[Request, int], Sequence[TokenDelta]],
) -> None:
    """Have the backend answer the n-th request it sees with `deltas(request, n)`."""
    requests = wire.backend.requests

    async def generate(request: Request) -> AsyncIterator[TokenDelta]:
        requests.append(request)
        for delta in deltas(request, len(requests) - 1):
            yield delta

    monkeypatch.setattr(wire.backend, "generate", generate)


def best(positions: Sequence[inference_pb2.TopLogprobs]) -> list[list[tuple[int, float]]]:
    """Pairs for each position."""
    return [list(zip(position.token_ids, position.logprobs, strict=True)) for position in positions]


def top(answer: Answer) -> list[list[tuple[int, float]]]:
    """An answer's top logprobs, in step with the ids of each chunk."""
    for chunk in answer.chunks:
        assert len(chunk.top_logprobs) == len(chunk.token_ids) == len(chunk.logprobs)
    return best([position for chunk in answer.chunks for position in chunk.top_logprobs])


@pytest.mark.parametrize("sizes", [(1,) * 7, (3, 4), (2, 2, 3), (7,)])
async def test_x32_top_logprobs_end_at_the_stop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """As ids and logprobs do, with the token that completes it, in deltas of one step or more."""
    token_ids = tokenizer.encode(TEXT)
    async with served(tokenizer) as wire:
        scripted(wire, monkeypatch, lambda request, _: deltas_of(request, token_ids, sizes))
        fields = {"stopping": {"stop": ["z{"]}, "top_logprobs": 3}
        answer = await wire.ask(**fields)
        whole = await wire.stub.Generate(request(**fields))
    expected = [[(rank, -place - rank / 100) for rank in range(3)] for place in range(4)]
    assert top(answer) == expected == best(whole.answers[0].top_logprobs)
    assert (answer.text, answer.token_ids) == ("xy", list(token_ids[:4]))
    assert answer.logprobs == [0.0, -1.0, -2.0, -3.0] == whole.answers[0].logprobs
    assert (answer.last.finish_reason, answer.last.usage.completion_tokens) == (STOP, 4)
    assert answer.last.speculation.accepted <= 4


async def test_prompt_logprobs_come_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first message of answer 0, however many answers there are; never unasked."""
    token_ids = tokenizer.encode(TEXT)
    async with served(tokenizer) as wire:
        scripted(wire, monkeypatch, lambda request, _: deltas_of(request, token_ids, (3, 4)))
        fields = {"prompt_logprobs": True, "sampling": {"num_answers": 2}}
        answers = await wire.ask_several(**fields)
        whole = await wire.stub.Generate(request(**fields))
        unasked = await wire.ask()
    told = [[tuple(chunk.prompt_logprobs) for chunk in answer.chunks] for answer in answers]
    assert told == [[PROMPT_LOGPROBS, ()], [(), ()]]
    assert tuple(whole.prompt_logprobs) == PROMPT_LOGPROBS
    assert not any(chunk.prompt_logprobs for chunk in unasked.chunks)


async def test_x56_cached_tokens_are_in_the_usage(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of answer 0; the other answers' prompts count neither as prompt nor as cached."""
    token_ids = tokenizer.encode(TEXT)
    async with served(tokenizer) as wire:
        scripted(wire, monkeypatch, lambda request, _: deltas_of(request, token_ids, (7,)))
        for num_answers in (1, 3):
            message = request(sampling={"num_answers": num_answers})
            usage = (await wire.stub.Generate(message)).usage
            assert (usage.prompt_tokens, usage.cached_tokens) == (NUM_PROMPT, 2)
            assert usage.completion_tokens == 7 * num_answers


async def test_joined_deltas_tell_of_their_steps(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was slow still counts the steps that the target took."""
    token_ids = tokenizer.encode(TEXT)
    async with served(tokenizer) as wire:
        scripted(wire, monkeypatch, lambda request, _: deltas_of(request, token_ids, (1, 2, 4)))
        answer = await wire.ask()
    assert [chunk.num_steps for chunk in answer.chunks] == [1, 2, 2]
    assert answer.last.speculation.steps == 5
    assert answer.last.finish_reason == LENGTH


@pytest.mark.parametrize(
    ("reason", "details", "outcome"),
    [
        (FinishReason.FAILED, "no token is left to draw", "failed"),
        (FinishReason.ERROR, "internal error; the server's log says more", "error"),
    ],
)
@pytest.mark.parametrize("num_answers", [1, 3])
async def test_x43_one_failure_is_internal_for_that_call_only(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    reason: FinishReason,
    details: str,
    outcome: str,
    num_answers: int,
) -> None:
    """The failing answer's fault is said when it is the request's own; the next call is served."""
    token_ids = tokenizer.encode(TEXT)

    def deltas(request: Request, number: int) -> list[TokenDelta]:
        regular = deltas_of(request, token_ids, (3, 4))
        if number != num_answers - 1:
            return regular
        end = TokenDelta(
            request_id=request.request_id,
            finish_reason=reason,
            error="no token is left to draw",
        )
        return [regular[0], end]

    async with served(tokenizer) as wire:
        scripted(wire, monkeypatch, deltas)
        with pytest.raises(aio.AioRpcError) as failed:
            await wire.ask_several(sampling={"num_answers": num_answers})
        assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.INTERNAL, details)
        assert (await wire.ask()).text == TEXT
        counted = series(wire.gateway_registry)
    assert counted[f"drafthouse_requests_total{{outcome={outcome}}}"] == 1
    assert counted["drafthouse_requests_total{outcome=length}"] == 1
