"""Stop strings: nothing of them leaks, and the cut does not depend on how the text came."""

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.text.stops import StopChecker

letters = st.text("ab#", max_size=30)
stops_of = st.lists(st.text("ab#", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, written naively: the first end wins, and of those the longest."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def stream(chunks: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    checker = StopChecker(stops)
    released: list[str] = []
    for chunk in chunks:
        checked = checker.push(chunk)
        released.append(checked.text)
        if checked.stop is not None:
            return released, checked.stop
    return [*released, checker.flush()], None


@given(st.lists(letters, max_size=8), stops_of)
@example(["##", "#"], ["###"])
@example(["##a"], ["###"])
@example(["ab", "ab", "a"], ["ababa", "bab"])
def test_equals_the_naive_cut(chunks: list[str], stops: list[str]) -> None:
    """Any text in any pieces with any stops gives what cutting the whole text gives."""
    released, stop = stream(chunks, stops)
    assert ("".join(released), stop) == cut("".join(chunks), stops)


@given(letters, stops_of)
def test_no_prefix_leaks_and_nothing_is_held_too_long(text: str, stops: list[str]) -> None:
    """After each character exactly the longest end that may begin a stop is held back."""
    checker = StopChecker(stops)
    shown = ""
    for length, character in enumerate(text, start=1):
        checked = checker.push(character)
        shown += checked.text
        if checked.stop is not None:
            return
        held = text[len(shown) : length]
        ends = [text[length - n : length] for n in range(length, 0, -1)]
        begins = [end for end in ends if any(stop.startswith(end) for stop in stops)]
        assert held == (begins[0] if begins else "")


@given(letters, letters, stops_of)
def test_text_that_is_passed_by_stops_nothing(before: str, after: str, stops: list[str]) -> None:
    """A stop completed inside passed-by text does not count; one that ends later does."""
    checker = StopChecker(stops)
    shown = checker.pass_by(before)
    checked = checker.push(after)
    shown += checked.text if checked.stop else checked.text + checker.flush()
    whole = before + after
    expected = (whole, None)
    for end in range(len(before) + 1, len(whole) + 1):
        found = [stop for stop in sorted(stops, key=len) if whole[:end].endswith(stop)]
        if found:
            expected = (whole[: end - len(found[-1])], found[-1])
            break
    assert (shown, checked.stop) == expected
