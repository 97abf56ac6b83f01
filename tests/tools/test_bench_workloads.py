"""What the benchmarks ask, and the files it may come from."""

import json
from pathlib import Path

import pytest

from cluster.errors import ConfigurationError
from cluster.text.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from cluster.tools.bench.workloads import BUILT_IN, parse_workload
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small byte-level tokenizer with a chat template."""
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def written(folder: Path, *lines: object) -> Path:
    """A file of those lines; what is no text is written as JSON."""
    path = folder / "prompts.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def asked(text: str) -> tuple[ChatMessage, ...]:
    """One question."""
    return (ChatMessage(role="user", content=text),)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_workloads_have_prompts_of_their_own(name: str) -> None:
    """Eight prompts or more, none of them twice: enough for a wave of eight."""
    prompts = parse_workload(name).prompts
    assert len(prompts) == len(set(prompts)) >= 8


def test_a_workload_starts_again_when_it_is_short(tokenizer: Tokenizer) -> None:
    """Any number of prompts can be asked for."""
    prompts = parse_workload("copy").token_ids(tokenizer, 11)
    assert len(prompts) == 11
    assert prompts[8:] == prompts[:3]


def test_jsonl_takes_prompts_and_conversations(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Plain text is tokenised as it is, messages through the template; other fields are nobody's.

    A line separator that JSON allows inside a text ends no line.
    """
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = written(tmp_path, {"prompt": "Once\u2028upon", "id": 7}, "", {"messages": messages})
    workload = parse_workload(f"jsonl:{path}")
    conversation = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))
    assert workload.prompts == ("Once\u2028upon", conversation)
    assert workload.token_ids(tokenizer, 2) == [
        tokenizer.encode("Once\u2028upon"),
        tokenizer.chat(conversation),
    ]


def test_spec_bench_asks_of_every_category_in_turn(tmp_path: Path) -> None:
    """The first few prompts are not all of the category that the file begins with."""
    path = written(
        tmp_path,
        {"question_id": 1, "category": "writing", "turns": ["w1", "again"]},
        {"question_id": 2, "category": "writing", "turns": ["w2"]},
        {"question_id": 3, "category": "writing", "turns": ["w3"]},
        {"question_id": 4, "category": "math", "turns": ["m1"]},
    )
    workload = parse_workload(f"spec_bench:{path}")
    assert workload.prompts == tuple(map(asked, ("w1", "m1", "w2", "w3")))


@pytest.mark.parametrize(
    ("kind", "line", "problem"),
    [
        ("jsonl", "{not json", "line 2: "),
        ("jsonl", "[1, 2]", "line 2: not an object"),
        ("jsonl", {"text": "hello"}, "line 2: prompt is missing"),
        ("jsonl", {"prompt": 5}, "line 2: prompt is missing or not a str"),
        ("jsonl", {"prompt": ""}, "line 2: nothing to answer"),
        ("jsonl", {"messages": []}, "line 2: nothing to answer"),
        ("jsonl", {"messages": [{"role": "user"}]}, "line 2: a message needs a role"),
        ("jsonl", {"prompt": "a", "messages": []}, "line 2: prompt and messages are both there"),
        ("spec_bench", {"category": "math"}, "line 2: turns is missing"),
        ("spec_bench", {"turns": [], "category": "math"}, "line 2: turns is not a list of texts"),
        ("spec_bench", {"turns": [3], "category": "math"}, "line 2: turns is not a list of texts"),
        ("spec_bench", {"turns": ["a"]}, "line 2: category is missing"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, kind: str, line: object, problem: str) -> None:
    """The error says which file, which line and what about it."""
    right = {"jsonl": {"prompt": "a"}, "spec_bench": {"turns": ["a"], "category": "b"}}[kind]
    path = written(tmp_path, right, line)
    with pytest.raises(ConfigurationError) as caught:
        parse_workload(f"{kind}:{path}")
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["poems", "jsonl", "jsonl:", "csv:file", "copy:file", ""])
def test_an_unknown_workload_is_refused_with_the_known_ones(text: str) -> None:
    """A typo is an error that names what there is."""
    with pytest.raises(ConfigurationError, match="copy, code, chat, math, spec_bench:PATH"):
        parse_workload(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file, one that is not text, and one without prompts."""
    missing, binary, empty = tmp_path / "missing", tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text("\n\n")
    for path in (missing, binary, empty):
        with pytest.raises(ConfigurationError, match=path.name):
            parse_workload(f"jsonl:{path}")
