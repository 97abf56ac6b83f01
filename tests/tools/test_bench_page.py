"""The report page: one well-formed file that fetches nothing."""

import re
from html.parser import HTMLParser

import pytest

from cluster.tools.bench.page import Bars, Lines, Section, Sheet, page

VOID = {"meta", "br"}
SECTION = Section(
    "What <b> & more",
    'A "note" with <tags>',
    (Sheet(("a", "b"), [("1", "text"), ("<2>", "&")]),),
    (
        Lines("Lines", "x", "y", {"one": [(1, 2.0), (10, 4.0)], "two": []}, log_x=True),
        Lines("Level", "x", "y", {"one": [(1, 0.0)]}, reference=1.0),
        Lines("Nothing", "x", "y", {}),
        Bars("Bars", "y", {"g": {"one": 1.0, "two": 0.5}, "h": {"two": 2.0}}, reference=1.0),
        Bars("Nothing", "y", {}),
    ),
)


class Balance(HTMLParser):
    """Fails on a tag that is closed in the wrong place, and keeps all attributes and texts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element without content."""
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        """An element ends: it must be the one that began last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        self.texts.append(data)


def parsed(text: str) -> Balance:
    """A page, checked."""
    balance = Balance()
    balance.feed(text)
    balance.close()
    assert not balance.open
    return balance


def check_alone(text: str) -> Balance:
    """A page that needs nothing from anywhere."""
    balance = parsed(text)
    assert not {"script", "link", "iframe", "img", "object", "use"} & set(balance.tags)
    assert not {"src", "href", "xlink:href", "data", "action"} & {
        name for name, _ in balance.attributes
    }
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    return balance


def test_the_page_is_well_formed_and_alone() -> None:
    """Every element ends where it should, and nothing is fetched."""
    balance = check_alone(page("Title & <more>", [SECTION, SECTION]))
    assert balance.tags.count("svg") == 6  # pictures of nothing are left out
    assert balance.tags.count("table") == 2


def test_texts_are_shown_as_they_are() -> None:
    """What looks like a tag is text."""
    balance = parsed(page("T", [SECTION]))
    assert 'A "note" with <tags>' in balance.texts
    assert "<2>" in balance.texts


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e9])
def test_any_value_has_its_place(value: float) -> None:
    """Nothing is drawn outside of the picture, however small or large the numbers are."""
    bars = Bars("B", "y", {"g": {"n": value}}, reference=value / 2)
    lines = Lines("L", "x", "y", {"n": [(1.0, value), (2.0, value / 2)]})
    text = page("T", [Section("S", "", (), (bars, lines))])
    for place in re.findall(r'(?:c?[xy]|[xy][12]|height)="(-?[\d.e+-]+)"', text):
        assert 0 <= float(place) <= 1000
    assert "nan" not in text
