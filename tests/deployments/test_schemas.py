"""Every field of a request is read, checked and named."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.engine.validation import validate
from cluster.errors import InvalidRequest, UnknownModel
from cluster.messages import ModelInfo
from cluster.models.reference import GenerationDefaults
from cluster.request import (
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    answer_seed,
)
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from cluster.tools.fields import EXACT_FIELDS, REFUSED_FIELDS
from deployments.schemas import RequestReader
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
from tests.harness import make_limits
from tests.wire import request

NAN, INFINITY = float("nan"), float("inf")
MODEL = ModelInfo(name="tiny", max_model_len=64, vocab_size=300, drafters=())
TURN = {"role": "user", "content": "hi"}

WRONG: tuple[tuple[dict[str, object], str], ...] = (
    ({"token_ids": [300]}, "token_ids: 300 is not in the vocabulary of 300"),
    ({"token_ids": [5] * 64}, "token_ids: 64 tokens leave no room in a context of 64"),
    ({"prompt": "a" * 64}, "prompt: 64 tokens leave no room"),
    ({"prompt": ""}, "prompt: is empty"),
    ({"messages": []}, "prompt: exactly one of prompt, messages, token_ids is needed; none"),
    ({"prompt": "a", "token_ids": [1]}, "prompt: exactly one of .*; prompt and token_ids are"),
    ({"prompt": "", "messages": [TURN]}, "prompt: exactly one of"),
    ({"messages": [TURN, {"role": "robot"}]}, r"messages\[1\].role: 'robot' is not one of"),
    ({"messages": [TURN] * 1025}, "messages: 1025 are over the limit of 1024"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature: -0.1 is neither"),
    ({"sampling": {"temperature": 1e-4}}, "sampling.temperature: 0.0001 is neither"),
    ({"sampling": {"temperature": 100.1}}, "sampling.temperature: 100.1 is neither"),
    ({"sampling": {"temperature": NAN}}, "sampling.temperature: nan is neither"),
    ({"sampling": {"temperature": INFINITY}}, "sampling.temperature: inf is neither"),
    ({"sampling": {"top_k": 301}}, r"sampling.top_k: 301 is not in \[0, 300\]"),
    ({"sampling": {"top_p": 0.0}}, r"sampling.top_p: 0.0 is not in \(0, 1\]"),
    ({"sampling": {"top_p": 1.01}}, "sampling.top_p: 1.01 is not in"),
    ({"sampling": {"top_p": NAN}}, "sampling.top_p: nan is not in"),
    ({"sampling": {"min_p": -0.1}}, r"sampling.min_p: -0.1 is not in \[0, 1\]"),
    ({"sampling": {"min_p": 1.1}}, "sampling.min_p: 1.1 is not in"),
    ({"sampling": {"min_p": NAN}}, "sampling.min_p: nan is not in"),
    ({"sampling": {"repetition_penalty": 0.0}}, r"sampling.repetition_penalty: 0.0 .* \(0, 10"),
    ({"sampling": {"repetition_penalty": 10.1}}, "sampling.repetition_penalty: 10.1 is not in"),
    ({"sampling": {"repetition_penalty": NAN}}, "sampling.repetition_penalty: nan is not in"),
    ({"sampling": {"presence_penalty": 2.1}}, r"sampling.presence_penalty: 2.1 .* \[-2.0, 2.0\]"),
    ({"sampling": {"presence_penalty": NAN}}, "sampling.presence_penalty: nan is not in"),
    ({"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty: -2.1 is not in"),
    ({"sampling": {"frequency_penalty": -INFINITY}}, "sampling.frequency_penalty: -inf is not"),
    ({"sampling": {"logit_bias": {300: 1.0}}}, "sampling.logit_bias: 300 is not in the vocab"),
    ({"sampling": {"logit_bias": {7: 100.1}}}, r"sampling.logit_bias\[7\]: 100.1 is not in \["),
    ({"sampling": {"logit_bias": {7: NAN}}}, r"sampling.logit_bias\[7\]: nan is not in"),
    (
        {"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}},
        "sampling.logit_bias: 1025 are over the limit of 1024",
    ),
    ({"sampling": {"allowed_token_ids": [1, 300]}}, "sampling.allowed_token_ids: 300 is not in"),
    ({"sampling": {"allowed_token_ids": [1] * 1025}}, "sampling.allowed_token_ids: 1025 are over"),
    ({"sampling": {"banned_token_ids": [300]}}, "sampling.banned_token_ids: 300 is not in"),
    ({"sampling": {"banned_token_ids": [1] * 1025}}, "sampling.banned_token_ids: 1025 are over"),
    (
        {"sampling": {"allowed_token_ids": [5, 6], "banned_token_ids": [4, 5, 6]}},
        "sampling.allowed_token_ids: all of them are banned",
    ),
    ({"sampling": {"banned_words": ["a"] * 65}}, "sampling.banned_words: 65 are over the limit of"),
    ({"sampling": {"banned_words": ["a", ""]}}, r"sampling.banned_words\[1\]: 0 characters is not"),
    ({"sampling": {"banned_words": ["a" * 65]}}, r"sampling.banned_words\[0\]: 65 characters is"),
    ({"sampling": {"banned_words": ["a" * 64]}}, r"sampling.banned_words\[0\]: 65 tokens is not"),
    ({"sampling": {"num_answers": 0}}, r"sampling.num_answers: 0 is not in \[1, 16\]"),
    ({"sampling": {"num_answers": 17}}, "sampling.num_answers: 17 is not in"),
    ({"grammar": {}}, "grammar: exactly one of json_schema, regex, lark is needed; none is given"),
    ({"grammar": {"regex": "a" * 65537}}, "grammar.regex: 65537 bytes are more than 65536"),
    ({"grammar": {"lark": "é" * 8193}}, "grammar.lark: 16386 bytes are more than 16384"),
    ({"grammar": {"json_schema": "bad"}}, "grammar.json_schema: is not JSON"),
    ({"grammar": {"regex": "("}}, "grammar.regex: "),
    ({"grammar": {"lark": "start: missing"}}, "grammar.lark: "),
    ({"top_logprobs": 21}, r"top_logprobs: 21 is not in \[0, 20\]"),
    ({"priority": 101}, r"priority: 101 is not in \[-100, 100\]"),
    ({"priority": -101}, "priority: -101 is not in"),
    ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens: 0 is below 1"),
    ({"stopping": {"min_tokens": 62}}, r"stopping.min_tokens: 62 is not in \[0, 61\]"),
    ({"stopping": {"min_tokens": 3, "max_tokens": 2}}, "stopping.min_tokens: 3 is not in"),
    ({"stopping": {"stop": ["a"] * 17}}, "stopping.stop: 17 are over the limit of 16"),
    ({"stopping": {"stop": ["a", ""]}}, r"stopping.stop\[1\]: 0 characters is not in \[1, 256\]"),
    ({"stopping": {"stop": ["a" * 257]}}, r"stopping.stop\[0\]: 257 characters is not in"),
    ({"stopping": {"stop_token_ids": [300]}}, "stopping.stop_token_ids: 300 is not in the"),
    ({"stopping": {"stop_token_ids": [1] * 129}}, "stopping.stop_token_ids: 129 are over"),
    ({"speculation": {"max_tokens": 65}}, r"speculation.max_tokens: 65 is not in \[0, 64\]"),
    ({"request_id": "a" * 129}, "request_id: 129 characters are over the limit of 128"),
    ({"request_id": "a\nb"}, "request_id: has a character that is not printable ASCII"),
    ({"request_id": "ä"}, "request_id: has a character that is not printable ASCII"),
)
AT_THE_LIMIT: tuple[dict[str, object], ...] = (
    {"token_ids": [299] * 63},
    {"sampling": {"temperature": 0.0, "top_k": 300, "top_p": 1.0, "min_p": 1.0}},
    {"sampling": {"temperature": 100.0, "top_k": 0, "top_p": 1e-9, "min_p": 0.0}},
    {"sampling": {"temperature": 1e-3, "seed": 2**64 - 1}},
    {"sampling": {"repetition_penalty": 10.0, "presence_penalty": 2.0, "frequency_penalty": -2.0}},
    {"sampling": {"repetition_penalty": 1e-9, "presence_penalty": -2.0, "frequency_penalty": 2.0}},
    {"sampling": {"logit_bias": dict.fromkeys(range(300), 100.0)}},
    {"sampling": {"logit_bias": {299: -100.0}}},
    {"sampling": {"allowed_token_ids": [299] * 1024, "banned_token_ids": [298] * 1024}},
    {"sampling": {"banned_words": [f"{'a' * 61}{number}" for number in range(10, 74)]}},
    {"sampling": {"num_answers": 1}},
    {"grammar": {"lark": 'start: "a"\n//' + "é" * 8185}},
    {"grammar": {"json_schema": "{}" + " " * 65534}},
    {"top_logprobs": 20},
    {"priority": 100},
    {"priority": -100},
    {"stopping": {"min_tokens": 61, "stop": ["a" * 256] * 16, "stop_token_ids": [299] * 128}},
    {"stopping": {"max_tokens": 2**32 - 1}},
    {"speculation": {"max_tokens": 64}},
    {"request_id": "~" * 128},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=300))


@pytest.fixture
def reader(tokenizer: Tokenizer) -> RequestReader:
    """Of a model that recommends nothing."""
    return RequestReader(MODEL, tokenizer, GenerationDefaults(eos_token_ids=frozenset({2})))


def read_one(reader: RequestReader, message: inference_pb2.GenerateRequest) -> Request:
    """The request of the only answer that is asked for."""
    (read,) = reader.read(message)
    return read


@pytest.mark.parametrize(("fields", "problem"), WRONG)
def test_wrong_fields_are_named(
    reader: RequestReader, fields: dict[str, object], problem: str
) -> None:
    """What is outside its range is refused with the field's path and the limit."""
    message = request(**fields)
    if fields == {"messages": []}:
        message.ClearField("token_ids")
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        reader.read(message)


@pytest.mark.parametrize("fields", AT_THE_LIMIT)
def test_the_limits_themselves_are_served(reader: RequestReader, fields: dict[str, object]) -> None:
    """The last value inside each range is taken, and the engine takes it, too."""
    limits = make_limits(vocab_size=MODEL.vocab_size, max_model_len=MODEL.max_model_len)
    validate(read_one(reader, request(**fields)), limits)


def test_every_field_has_its_way_into_the_request(
    reader: RequestReader, tokenizer: Tokenizer
) -> None:
    """A request in which no field has its default arrives whole."""
    fields = {
        "model": "tiny",
        "token_ids": [9, 8],
        "sampling": {
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {8: -1.5, 4: 2.0},
            "allowed_token_ids": [7, 4, 4],
            "banned_token_ids": [9],
            "banned_words": ["qz", "~"],
            "seed": 3,
            "num_answers": 3,
        },
        "stopping": {
            "max_tokens": 10,
            "min_tokens": 2,
            "stop": ["x", "y"],
            "stop_token_ids": [4],
            "ignore_eos": True,
            "include_stop_text": True,
        },
        "grammar": {"regex": "[a-z]+"},
        "speculation": {"enabled": False, "max_tokens": 2},
        "logprobs": True,
        "top_logprobs": 5,
        "prompt_logprobs": True,
        "priority": -3,
        "request_id": "mine",
    }
    read, *others = reader.read(request(**fields))
    q, z, tilde, space = (tokenizer.encode(letter)[0] for letter in "qz~ ")
    assert read.request_id.startswith("mine-")
    assert read.prompt_token_ids == (9, 8)
    assert read.sampling == SamplingParams(
        seed=3,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((4, 2.0), (8, -1.5)),
        allowed_token_ids=(4, 7),
        banned_token_ids=tuple(sorted((9, tilde))),
        banned_sequences=((q, z), (space, q, z), (space, tilde)),
    )
    assert read.stopping == StoppingParams(
        max_tokens=10,
        min_tokens=2,
        stop=("x", "y"),
        stop_token_ids=(4,),
        ignore_eos=True,
        include_stop_text=True,
    )
    assert read.grammar == Grammar(GrammarKind.REGEX, "[a-z]+")
    assert read.speculation == SpeculationParams(enabled=False, max_tokens=2)
    assert (read.logprobs, read.top_logprobs, read.prompt_logprobs) == (True, 5, True)
    assert read.priority == -3
    assert len(others) == 2
    groups = {"sampling", "stopping", "speculation"}
    named = {"prompt", "messages", *fields} - groups - {"grammar"}
    nested = {f"{group}.{name}" for group in groups for name in fields[group]}  # type: ignore[attr-defined]
    grammars = {f"grammar.{kind}" for kind in GrammarKind}
    assert set(EXACT_FIELDS) == named | nested | grammars, "a field of the wire is not in this test"
    assert not set(EXACT_FIELDS) & set(REFUSED_FIELDS)


def test_further_answers_differ_in_seed_and_name_only(reader: RequestReader) -> None:
    """Each is what its seed alone would get; what is told of the prompt is told once."""
    message = request(sampling={"seed": 3, "num_answers": 16}, prompt_logprobs=True, priority=2)
    first, *others = reader.read(message)
    assert first.prompt_logprobs
    assert len(others) == 15
    for index, other in enumerate(others, start=1):
        assert other == replace(
            first,
            request_id=f"{first.request_id}.{index}",
            sampling=replace(first.sampling, seed=answer_seed(3, index)),
            prompt_logprobs=False,
        )


def test_seeds_of_answers_are_those_of_splitmix64() -> None:
    """Stable for ever: the reference algorithm's outputs, started where the wire says."""
    assert answer_seed(2**64 - 1, 0) == 2**64 - 1
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [answer_seed(0x616E7377657273, index) for index in (1, 2, 3)] == reference
    assert len({answer_seed(7, index) for index in range(16)}) == 16


def test_top_logprobs_imply_logprobs(reader: RequestReader) -> None:
    """The most probable tokens never come without the one that was drawn."""
    assert read_one(reader, request(top_logprobs=1)).logprobs


@pytest.mark.parametrize("word", ["the", " the"])
def test_a_banned_word_is_banned_with_and_without_a_space(tmp_path: Path, word: str) -> None:
    """Whichever way it is written: its tokens are those it has inside a text."""
    tokenizer = load_tokenizer(make_tokenizer(tmp_path, vocab_size=512))
    reader = RequestReader(
        replace(MODEL, vocab_size=512), tokenizer, GenerationDefaults(eos_token_ids=frozenset())
    )
    sampling = read_one(reader, request(sampling={"banned_words": [word]})).sampling
    banned = [*([token_id] for token_id in sampling.banned_token_ids), *sampling.banned_sequences]
    assert sorted(tokenizer.decode(token_ids) for token_ids in banned) == [" the", "the"]
    text = tokenizer.encode("what the")
    assert any(tuple(run) == text[-len(run) :] for run in banned)


def test_absent_fields_take_the_models_defaults(tokenizer: Tokenizer) -> None:
    """What the checkpoint recommends holds where the caller says nothing, and only there."""
    defaults = GenerationDefaults(
        eos_token_ids=frozenset({2}),
        temperature=0.6,
        top_k=1000,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
    )
    reader = RequestReader(MODEL, tokenizer, defaults)
    sampling = read_one(reader, request()).sampling
    assert sampling == SamplingParams(
        seed=sampling.seed,
        temperature=0.6,
        top_k=300,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
    )
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    sampling = read_one(reader, request(sampling=off)).sampling
    assert sampling == SamplingParams(seed=sampling.seed, temperature=0.0)


def test_absent_fields_without_recommendation(reader: RequestReader) -> None:
    """The wire's own defaults, with a drawn seed and id."""
    read = read_one(reader, request())
    assert read.sampling == SamplingParams(seed=read.sampling.seed)
    assert 0 <= read.sampling.seed < 2**63
    assert read.stopping == StoppingParams()
    assert read.speculation == SpeculationParams()
    assert not read.logprobs
    assert not read.top_logprobs
    assert read.grammar is None
    assert read.request_id != read_one(reader, request()).request_id


def test_unknown_model(reader: RequestReader) -> None:
    """Another model's name is refused with the one that is served."""
    with pytest.raises(UnknownModel, match="'other' is not served here; served: tiny"):
        reader.read(request(model="other"))


@pytest.mark.parametrize(
    ("path", "name"), [("", "GenerateRequest"), ("sampling", "sampling"), ("messages", "messages")]
)
def test_unknown_fields_are_refused(reader: RequestReader, path: str, name: str) -> None:
    """A field of a newer client is an error that says where it is, not a wish unheard."""
    message = request(sampling={"top_k": 3}, **({"messages": [TURN]} if path == "messages" else {}))
    part = getattr(message, path) if path else message
    part = part[0] if path == "messages" else part
    part.MergeFromString(bytes([0xFA, 0x3E, 0x01, 0x00]))  # field 1007, one byte
    with pytest.raises(InvalidRequest, match=f"^{name}: field number 1007 is not known here"):
        reader.read(message)


def test_generated_messages_know_presence() -> None:
    """Zero that was sent is not the same as nothing."""
    sampling = inference_pb2.Sampling.FromString(
        inference_pb2.Sampling(temperature=0.0).SerializeToString()
    )
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
