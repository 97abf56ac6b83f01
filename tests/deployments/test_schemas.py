"""Every field of a request is read, checked and named."""

import pytest

from cluster.errors import InvalidRequest, UnknownModel
from cluster.messages import ModelInfo
from cluster.models.reference import GenerationDefaults
from cluster.request import SamplingParams, SpeculationParams, StoppingParams
from cluster.text.tokenizer import Tokenizer, load_tokenizer
from deployments.schemas import SERVED_FIELDS, RequestReader
from protos import inference_pb2
from tests.checkpoints import make_tokenizer
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
    """The last value inside each range is taken."""
    assert reader.read(request(**fields)).prompt_token_ids


def test_every_field_has_its_way_into_the_request(reader: RequestReader) -> None:
    """A request in which no field has its default arrives whole."""
    fields = {
        "model": "tiny",
        "token_ids": [9, 8],
        "sampling": {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3},
        "stopping": {
            "max_tokens": 10,
            "min_tokens": 2,
            "stop": ["x", "y"],
            "stop_token_ids": [4],
            "ignore_eos": True,
            "include_stop_text": True,
        },
        "speculation": {"enabled": False, "max_tokens": 2},
        "logprobs": True,
        "request_id": "mine",
    }
    read = reader.read(request(**fields))
    assert read.request_id.startswith("mine-")
    assert read.prompt_token_ids == (9, 8)
    assert read.sampling == SamplingParams(seed=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    assert read.stopping == StoppingParams(
        max_tokens=10,
        min_tokens=2,
        stop=("x", "y"),
        stop_token_ids=(4,),
        ignore_eos=True,
        include_stop_text=True,
    )
    assert read.speculation == SpeculationParams(enabled=False, max_tokens=2)
    assert read.logprobs
    named = {"prompt", "messages", *fields} - {"sampling", "stopping", "speculation"}
    nested = {
        f"{group}.{name}"
        for group in ("sampling", "stopping", "speculation")
        for name in fields[group]  # type: ignore[attr-defined]
    }
    assert set(SERVED_FIELDS) == named | nested, "a field of the wire is not in this test"


def test_absent_fields_take_the_models_defaults(tokenizer: Tokenizer) -> None:
    """What the checkpoint recommends holds where the caller says nothing, and only there."""
    defaults = GenerationDefaults(
        eos_token_ids=frozenset({2}), temperature=0.6, top_k=1000, top_p=0.95
    )
    reader = RequestReader(MODEL, tokenizer, defaults)
    sampling = reader.read(request()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 300, 0.95)
    sampling = reader.read(request(sampling={"temperature": 0.0, "top_k": 0, "top_p": 1})).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 1.0)


def test_absent_fields_without_recommendation(reader: RequestReader) -> None:
    """The wire's own defaults, with a drawn seed and id."""
    read = reader.read(request())
    assert read.sampling == SamplingParams(seed=read.sampling.seed)
    assert 0 <= read.sampling.seed < 2**63
    assert read.stopping == StoppingParams()
    assert read.speculation == SpeculationParams()
    assert not read.logprobs
    assert read.request_id != reader.read(request()).request_id


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
