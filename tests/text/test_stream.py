"""Token deltas to text deltas: text, ids, logprobs and accepted drafts are cut together."""

import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import DrafthouseError, RequestFailed, Unavailable
from cluster.messages import TokenDelta
from cluster.request import FinishReason, StoppingParams
from cluster.text.answer import Answer
from cluster.text.stream import TextDelta, TextStream, stream_text
from cluster.text.tokenizer import Tokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def deltas_of(
    token_ids: Sequence[int], sizes: Sequence[int], *, finish_reason: FinishReason = LENGTH
) -> list[TokenDelta]:
    """The ids in runs of those sizes, all but the last of each an accepted draft."""
    deltas = []
    rest = list(enumerate(token_ids))
    for size in itertools.chain(sizes, itertools.repeat(1)):
        run, rest = rest[:size], rest[size:]
        deltas.append(
            TokenDelta(
                request_id="r",
                token_ids=tuple(token_id for _, token_id in run),
                logprobs=tuple(-float(place) for place, _ in run),
                top_logprobs=tuple(((token_id, -float(place)),) for place, token_id in run),
                num_cached_tokens=0 if deltas else 2,
                num_drafted=5,
                num_accepted=max(0, len(run) - 1),
                finish_reason=None if rest else finish_reason,
            )
        )
        if not rest:
            return deltas
    raise AssertionError


def stream(
    tokenizer: Tokenizer, deltas: Sequence[TokenDelta], **stopping: object
) -> tuple[Answer, list[TextDelta]]:
    """All deltas of an answer, as far as it goes."""
    texts = TextStream(tokenizer.vocabulary, StoppingParams(**stopping))  # type: ignore[arg-type]
    answer = Answer(num_prompt_tokens=3, seed=0)
    out = []
    for delta in deltas:
        out.append(texts.push(delta))
        answer.add(out[-1])
        if answer.finish_reason is not None:
            break
    return answer, out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_x32_all_ends_at_the_stop(byte_level: Tokenizer, size: int) -> None:
    """A stop over two tokens inside an accepted run: everything ends with the second of them."""
    token_ids = byte_level.encode("xyz{}qq")
    assert len(token_ids) == 7
    answer, out = stream(byte_level, deltas_of(token_ids, [size] * 7), stop=("z{",))
    assert answer.text == "xy"
    assert answer.token_ids == list(token_ids[:4])
    assert answer.logprobs == [0.0, -1.0, -2.0, -3.0]
    assert answer.top_logprobs == [((key, -float(n)),) for n, key in enumerate(token_ids[:4])]
    assert answer.finish_reason is STOP
    assert answer.num_accepted <= len(answer.token_ids)
    assert all(delta.num_accepted <= len(delta.token_ids) for delta in out)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_x32_the_stop_is_kept_when_asked(byte_level: Tokenizer, size: int) -> None:
    """include_stop_text shows the stop and still nothing after it."""
    deltas = deltas_of(byte_level.encode("xyz{}qq"), [size] * 7)
    answer, _ = stream(byte_level, deltas, stop=("z{",), include_stop_text=True)
    assert (answer.text, len(answer.token_ids)) == ("xyz{", 4)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1), (1, 2), (3,)])
def test_x35_no_part_of_a_stop_leaks(byte_level: Tokenizer, sizes: tuple[int, ...]) -> None:
    """Stop "###" of "#", "#", "#": no "#" is ever shown; "##a" is shown whole."""
    answer, _ = stream(byte_level, deltas_of(byte_level.encode("###"), sizes), stop=("###",))
    assert (answer.text, answer.finish_reason) == ("", STOP)
    answer, _ = stream(byte_level, deltas_of(byte_level.encode("##a"), sizes), stop=("###",))
    assert (answer.text, answer.finish_reason) == ("##a", LENGTH)


def test_held_text_is_flushed_at_the_end(byte_level: Tokenizer) -> None:
    """An answer that ends with what could have begun a stop has it in its last delta."""
    answer, out = stream(byte_level, deltas_of(byte_level.encode("a##"), []), stop=("###",))
    assert [delta.text for delta in out] == ["a", "", "##"]
    assert answer.text == "a##"


def test_eos_counts_and_has_no_text(byte_level: Tokenizer) -> None:
    """The id of EOS is in the answer; its text is not."""
    deltas = deltas_of([*byte_level.encode("a#"), 2], [2], finish_reason=STOP)
    answer, _ = stream(byte_level, deltas, stop=("##",))
    assert (answer.text, answer.token_ids[-1], len(answer.token_ids)) == ("a#", 2, 3)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_text_of_a_stop_token(byte_level: Tokenizer, text: str, *, include: bool) -> None:
    """A stop token with a text of its own shows it only with include_stop_text."""
    deltas = deltas_of(byte_level.encode("ab"), [], finish_reason=STOP)
    answer, _ = stream(byte_level, deltas, include_stop_text=include)
    assert (answer.text, len(answer.token_ids)) == (text, 2)


def test_stop_strings_wait_for_min_tokens(byte_level: Tokenizer) -> None:
    """A stop completed before min_tokens is text; one completed by that token ends the answer."""
    deltas = deltas_of(byte_level.encode("a#b#c"), [2, 2])
    answer, _ = stream(byte_level, deltas, stop=("#",), min_tokens=3)
    assert (answer.text, len(answer.token_ids)) == ("a#b", 4)
    answer, _ = stream(byte_level, deltas, stop=("#",), min_tokens=4)
    assert (answer.text, len(answer.token_ids)) == ("a#b", 4)
    answer, _ = stream(byte_level, deltas, stop=("#",), min_tokens=5)
    assert (answer.text, answer.finish_reason) == ("a#b#c", LENGTH)


@settings(deadline=None)
@given(
    st.data(),
    st.lists(st.integers(1, 6), max_size=20),
    st.lists(st.text("ab👍é", min_size=1, max_size=3), max_size=3),
)
def test_any_ids_in_any_runs_give_the_naive_cut(
    byte_level: Tokenizer, data: st.DataObject, sizes: list[int], stops: list[str]
) -> None:
    """The answer is the shortest run of ids whose text has a stop in it, cut there."""
    alphabet = sorted(set(byte_level.encode("ab👍é你")))
    token_ids = data.draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=20))
    answer, out = stream(byte_level, deltas_of(token_ids, sizes), stop=tuple(stops))
    expected = (byte_level.decode(token_ids), len(token_ids), LENGTH)
    for num_tokens in range(1, len(token_ids) + 1):
        text = byte_level.decode(token_ids[:num_tokens])
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        if found:
            expected = (text[: min(found)[1]], num_tokens, STOP)
            break
    assert (answer.text, len(answer.token_ids), answer.finish_reason) == expected
    assert answer.logprobs == [-float(place) for place in range(len(answer.token_ids))]
    best = [((token_id, -float(place)),) for place, token_id in enumerate(answer.token_ids)]
    assert answer.top_logprobs == best
    assert answer.num_steps == len(out)
    assert answer.num_cached_tokens == 2
    for number in range(1, len(out)):
        shown = "".join(delta.text for delta in out[:number])
        known = byte_level.decode(token_ids[: sum(len(d.token_ids) for d in out[:number])])
        assert known.startswith(shown), "text before its tokens"


async def closed_after(deltas: list[TokenDelta], log: list[str]) -> AsyncIterator[TokenDelta]:
    """A backend's deltas; notes when it was closed."""
    try:
        for delta in deltas:
            yield delta
    finally:
        log.append("closed")


async def test_backend_is_closed_before_the_last_delta(byte_level: Tokenizer) -> None:
    """Finding the stop ends the sequence; nobody computes on while the end is delivered."""
    log: list[str] = []
    deltas = deltas_of(byte_level.encode("ab#cdef"), [])
    texts = TextStream(byte_level.vocabulary, StoppingParams(stop=("#",)))
    async for delta in stream_text(closed_after(deltas, log), texts):
        log += [delta.text, "sent"]
    assert log == ["a", "sent", "b", "sent", "closed", "", "sent"]


async def test_an_answer_that_breaks_off_is_an_error(byte_level: Tokenizer) -> None:
    """A backend that just ends has not answered."""
    texts = TextStream(byte_level.vocabulary, StoppingParams())
    deltas = closed_after(deltas_of(byte_level.encode("ab"), [])[:1], [])
    with pytest.raises(Unavailable):
        _ = [delta async for delta in stream_text(deltas, texts)]


@pytest.mark.parametrize(
    ("reason", "error", "says"),
    [
        (FinishReason.FAILED, RequestFailed, "no token is left"),
        (FinishReason.ABORT, Unavailable, "may be sent again"),
        (FinishReason.ERROR, DrafthouseError, "request r ended: no token is left"),
    ],
)
async def test_an_end_without_its_answer_is_an_error(
    byte_level: Tokenizer, reason: FinishReason, error: type[Exception], says: str
) -> None:
    """What came before is delivered, the backend is closed, and half an answer is never whole."""
    log: list[str] = []
    texts = TextStream(byte_level.vocabulary, StoppingParams())
    end = TokenDelta(request_id="r", finish_reason=reason, error="no token is left")
    deltas = stream_text(
        closed_after([*deltas_of(byte_level.encode("ab"), [])[:1], end], log), texts
    )
    assert (await anext(deltas)).text == "a"
    with pytest.raises(error, match=says) as raised:
        await anext(deltas)
    assert raised.type is error
    assert log == ["closed"]
