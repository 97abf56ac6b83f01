"""Answers over a real socket: text, ids, logprobs, usage and counts belong together."""

import grpc
import pytest

from cluster.text.tokenizer import Tokenizer, load_tokenizer
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.fakes import RandomDrafter, SameDrafter, SiblingDrafter
from tests.harness import series
from tests.wire import EOS, NUM_PROMPT, request, served

pytestmark = pytest.mark.wire

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH
TEXTS = ("👩‍👩‍👧 and 🇪🇺", "你好、世界", "e\u0301a\u0308\u0323 done")
DRAFTERS = (SameDrafter, RandomDrafter, SiblingDrafter)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: every character beyond ASCII is split over tokens."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3, 4, 5])
async def test_x34_no_broken_character(
    tokenizer: Tokenizer, text: str, num_speculative_tokens: int
) -> None:
    """Chunks join to the full text and none has a replacement character, whatever K is."""
    script = tokenizer.encode(text)
    async with served(tokenizer, script, num_speculative_tokens=num_speculative_tokens) as wire:
        answer = await wire.ask()
    assert answer.text == text
    assert not any("\ufffd" in chunk.text for chunk in answer.chunks)
    assert answer.token_ids == [*script, EOS]
    assert max(len(chunk.token_ids) for chunk in answer.chunks) == num_speculative_tokens + 1


async def test_x34_the_end_inside_a_character_shows_nothing_of_it(tokenizer: Tokenizer) -> None:
    """max_tokens may cut a character in two; the half is in the ids and not in the text."""
    script = tokenizer.encode("ok👍")
    async with served(tokenizer, script) as wire:
        for max_tokens in range(1, len(script) + 1):
            answer = await wire.ask(stopping={"max_tokens": max_tokens})
            assert len(answer.token_ids) == max_tokens
            assert answer.text == ("o", "ok", "ok", "ok", "ok", "ok👍")[max_tokens - 1]


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_x35_no_part_of_a_stop_leaks(
    tokenizer: Tokenizer, drafter: type[SameDrafter]
) -> None:
    """Stop "###": after "#", "#", "#" nothing is shown; "##a" is shown whole."""
    stopping = {"stop": ["###"]}
    async with served(tokenizer, tokenizer.encode("x###y"), drafter=drafter) as wire:
        answer = await wire.ask(stopping=stopping)
        assert [chunk.text for chunk in answer.chunks if chunk.text] == ["x"]
        assert (answer.text, answer.last.finish_reason) == ("x", STOP)
    async with served(tokenizer, tokenizer.encode("##a"), drafter=drafter) as wire:
        answer = await wire.ask(stopping=stopping)
        assert (answer.text, answer.last.finish_reason) == ("##a", STOP)
        assert answer.token_ids[-1] == EOS


@pytest.mark.parametrize(("include", "text"), [(False, "xy"), (True, "xyz{")])
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 2, 5, 16])
async def test_x32_all_ends_at_the_stop(
    tokenizer: Tokenizer, text: str, num_speculative_tokens: int, *, include: bool
) -> None:
    """A stop over two tokens in an accepted run ends text, ids, logprobs and usage."""
    script = tokenizer.encode("xyz{}qqqqqqqqqqqqqq")
    async with served(tokenizer, script, num_speculative_tokens=num_speculative_tokens) as wire:
        answer = await wire.ask(
            stopping={"stop": ["z{"], "include_stop_text": include}, logprobs=True
        )
    assert answer.text == text
    assert answer.token_ids == list(script[:4])
    assert len(answer.logprobs) == 4
    assert answer.last.finish_reason == STOP
    assert answer.last.usage.completion_tokens == 4
    assert answer.last.usage.total_tokens == NUM_PROMPT + 4
    assert answer.last.speculation.accepted <= 4


@pytest.mark.parametrize("num_speculative_tokens", [0, 2, 5])
async def test_x30_a_stop_id_inside_an_accepted_run(
    tokenizer: Tokenizer, num_speculative_tokens: int
) -> None:
    """The 4th token declared a stop id ends the answer: usage 4, nothing after it."""
    script = tokenizer.encode("wxyz{}")
    async with served(tokenizer, script, num_speculative_tokens=num_speculative_tokens) as wire:
        answer = await wire.ask(stopping={"stop_token_ids": [script[3]]})
    assert answer.token_ids == list(script[:4])
    assert (answer.text, answer.last.usage.completion_tokens) == ("wxy", 4)


@pytest.mark.parametrize("num_speculative_tokens", [1, 4])
async def test_x14_exactly_max_tokens(tokenizer: Tokenizer, num_speculative_tokens: int) -> None:
    """max_tokens of 1, 2, K and K+1 give exactly so many."""
    script = tokenizer.encode("a" * 30)
    async with served(tokenizer, script, num_speculative_tokens=num_speculative_tokens) as wire:
        for max_tokens in (1, 2, num_speculative_tokens, num_speculative_tokens + 1):
            answer = await wire.ask(stopping={"max_tokens": max_tokens})
            assert len(answer.token_ids) == answer.last.usage.completion_tokens == max_tokens
            assert answer.last.finish_reason == LENGTH


async def test_x11_the_context_is_the_limit(tokenizer: Tokenizer) -> None:
    """Answers end exactly where the context does; a prompt that fills it is refused."""
    async with served(tokenizer, num_speculative_tokens=16, max_model_len=64) as wire:
        for length in range(56, 64):
            answer = await wire.ask(token_ids=[5] * length, stopping={"ignore_eos": True})
            assert len(answer.token_ids) == 64 - length
            assert answer.last.finish_reason == LENGTH
        with pytest.raises(grpc.RpcError) as refused:
            await wire.ask(token_ids=[5] * 64)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "token_ids: 64 tokens" in refused.value.details()


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_x62_chunks_carry_their_tokens(
    tokenizer: Tokenizer, drafter: type[SameDrafter]
) -> None:
    """One inter-token observation for each token after the first chunk; gaps add up to the time."""
    async with served(
        tokenizer, tokenizer.encode("q" * 40), drafter=drafter, num_speculative_tokens=5
    ) as wire:
        answer = await wire.ask()
        counted = series(wire.gateway_registry)
    counts = [len(chunk.token_ids) for chunk in answer.chunks]
    assert sum(counts) == 41 == counted["drafthouse_generation_tokens_total"]
    assert counted["drafthouse_inter_token_seconds_count"] == 41 - counts[0]
    assert counted["drafthouse_time_to_first_token_seconds_count"] == 1
    spent = (
        counted["drafthouse_inter_token_seconds_sum"]
        + counted["drafthouse_time_to_first_token_seconds_sum"]
    )
    assert 0 < spent <= counted["drafthouse_request_seconds_sum"]
    assert all(chunk.num_accepted <= len(chunk.token_ids) for chunk in answer.chunks)


async def test_x60_emitted_drafted_accepted(tokenizer: Tokenizer) -> None:
    """EOS as the third of five drafts: 3 emitted, 5 drafted, and all accounts agree."""
    async with served(tokenizer, tokenizer.encode("xab"), num_speculative_tokens=5) as wire:
        answers = [await wire.ask(stopping={"min_tokens": 0}) for _ in range(3)]
        gateway, engine = series(wire.gateway_registry), series(wire.engine_registry)
    for answer in answers:
        assert answer.token_ids[-1] == EOS
        assert len(answer.token_ids) == answer.last.usage.completion_tokens == 4
    drafted = sum(answer.last.speculation.drafted for answer in answers)
    accepted = sum(answer.last.speculation.accepted for answer in answers)
    steps = sum(answer.last.speculation.steps for answer in answers)
    assert (drafted, accepted, steps) == (15, 9, 6)
    assert accepted == sum(chunk.num_accepted for answer in answers for chunk in answer.chunks)
    assert engine["drafthouse_spec_decode_num_draft_tokens_total"] == drafted
    assert engine["drafthouse_spec_decode_num_accepted_tokens_total"] == accepted
    assert engine["drafthouse_engine_tokens_total"] == 12
    assert gateway["drafthouse_generation_tokens_total"] == 12
    assert gateway["drafthouse_prompt_tokens_total"] == 3 * NUM_PROMPT


async def test_x22_speculation_changes_no_token(tokenizer: Tokenizer) -> None:
    """Off by the caller, capped by the caller, or on: the same answer to the last bit."""
    async with served(
        tokenizer, tokenizer.encode("the same answer"), drafter=SiblingDrafter
    ) as wire:
        answers = [
            await wire.ask(speculation=speculation, logprobs=True)
            for speculation in ({"enabled": False}, {"max_tokens": 0}, {"max_tokens": 2}, {})
        ]
    first = answers[0]
    for answer in answers:
        assert (answer.text, answer.token_ids) == (first.text, first.token_ids)
        assert answer.logprobs == first.logprobs
    assert [answer.last.speculation.drafted for answer in answers[:2]] == [0, 0]
    assert max(len(chunk.token_ids) for chunk in answers[2].chunks) <= 3


async def test_unary_is_the_stream_collected(tokenizer: Tokenizer) -> None:
    """Generate gives what GenerateStream's chunks add up to."""
    fields = {"logprobs": True, "sampling": {"seed": 7}, "stopping": {"stop": ["swer"]}}
    async with served(tokenizer, tokenizer.encode("one answer")) as wire:
        whole = await wire.stub.Generate(request(**fields))
        answer = await wire.ask(**fields)
    (only,) = whole.answers
    assert (only.text, only.token_ids) == (answer.text, answer.token_ids)
    assert only.logprobs == answer.logprobs
    assert (only.finish_reason, only.seed) == (answer.last.finish_reason, 7)
    assert (whole.usage, whole.speculation) == (answer.last.usage, answer.last.speculation)


async def test_the_account_is_in_the_last_message_only(tokenizer: Tokenizer) -> None:
    """Every message before the last is text and tokens; logprobs only when asked for."""
    async with served(tokenizer, tokenizer.encode("several messages")) as wire:
        answer = await wire.ask()
    assert len(answer.chunks) > 2
    for chunk in answer.chunks[:-1]:
        present = {field.name for field, _ in chunk.ListFields()}
        assert present <= {"text", "token_ids", "num_accepted", "num_steps"}


async def test_x20_a_seed_is_drawn_and_told(tokenizer: Tokenizer) -> None:
    """Requests without a seed get different ones; a given one comes back, up to 64 bits."""
    async with served(tokenizer, tokenizer.encode("a")) as wire:
        drawn = [(await wire.ask()).last.seed for _ in range(5)]
        given = [(await wire.ask(sampling={"seed": seed})).last.seed for seed in (0, 7, 2**64 - 1)]
        used = [sent.sampling.seed for sent in wire.backend.requests]
    assert len(set(drawn)) == 5
    assert given == [0, 7, 2**64 - 1]
    assert used == drawn + given


async def test_the_three_kinds_of_prompt_agree(tokenizer: Tokenizer) -> None:
    """A text, its token ids, and what Tokenize says are one and the same prompt."""
    async with served(tokenizer, tokenizer.encode("a")) as wire:
        turns = [{"role": "user", "content": "Hello"}]
        for fields in ({"prompt": "abc"}, {"messages": turns}):
            tokenized = await wire.stub.Tokenize(inference_pb2.TokenizeRequest(**fields))
            await wire.ask(**fields)
            await wire.ask(token_ids=list(tokenized.token_ids))
            by_text, by_ids = (sent.prompt_token_ids for sent in wire.backend.requests[-2:])
            assert by_text == by_ids
            back = inference_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
            text = (await wire.stub.Detokenize(back)).text
            assert text.startswith("abc" if "prompt" in fields else "user\nHello")


async def test_many_streams_at_once(tokenizer: Tokenizer) -> None:
    """Requests of one caller under one name do not disturb each other."""
    async with served(tokenizer, tokenizer.encode("all of them the same"), max_num_seqs=3) as wire:
        calls = [wire.stub.GenerateStream(request(request_id="same")) for _ in range(8)]
        texts = ["".join([chunk.text async for chunk in call]) for call in calls]
    assert set(texts) == {"all of them the same"}
    assert len({sent.request_id for sent in wire.backend.requests}) == 8
