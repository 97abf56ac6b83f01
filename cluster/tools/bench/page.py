"""A page of tables and pictures in one file: HTML with inline SVG, nothing to fetch, no scripts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import log10

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 180, 30, 45
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
NUM_TICKS = 5
STYLE = """
body { font-family: sans-serif; max-width: 1100px; margin: 2em auto; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 90% }
th, td { border: 1px solid #ccc; padding: 3px 8px; text-align: right }
th { background: #f2f2f2 }
td.text { text-align: left }
svg { margin: 0.5em 1em 0.5em 0 }
svg text { font-size: 11px; fill: #333 }
p.note { max-width: 60em }
"""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of texts."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Series of points by name; `reference` is a level that is drawn, too."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]
    reference: float | None = None
    log_x: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Values by group and then by name, in the order given; `reference` is a level."""

    title: str
    y_label: str
    groups: Mapping[str, Mapping[str, float]]
    reference: float | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, what was done, and what came out."""

    title: str
    note: str
    sheets: Sequence[Sheet] = ()
    pictures: Sequence[Lines | Bars] = field(default=())


def page(title: str, sections: Iterable[Section]) -> str:
    """The whole document."""
    body = "\n".join(map(_section, sections))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f'<p class="note">{escape(section.note)}</p>']
    parts += [_drawn(picture) for picture in section.pictures]
    parts += [_sheet(sheet) for sheet in section.sheets]
    return "\n".join(parts)


def _sheet(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in sheet.headings)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in sheet.rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _cell(text: str) -> str:
    kind = ' class="text"' if text[:1].isalpha() else ""
    return f"<td{kind}>{escape(text)}</td>"


def _drawn(picture: Lines | Bars) -> str:
    match picture:
        case Lines():
            return _lines(picture)
        case Bars():
            return _bars(picture)


def _lines(picture: Lines) -> str:
    points = [point for series in picture.series.values() for point in series]
    if not points:
        return ""
    xs = [_at(x, log=picture.log_x) for x, _ in points]
    low, high = min(xs), max(xs)
    frame = _Frame(max([y for _, y in points] + [picture.reference or 0.0]))

    def place(x: float) -> float:
        inside = (_at(x, log=picture.log_x) - low) / (high - low) if high > low else 0.5
        return LEFT + inside * (WIDTH - LEFT - RIGHT)

    drawn = [frame.axes(picture.title, picture.y_label, picture.reference)]
    drawn += [
        _text(place(x), HEIGHT - BOTTOM + 15, f"{x:g}", anchor="middle")
        for x in sorted({x for x, _ in points})[:12]
    ]
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, picture.x_label, anchor="middle"))
    for number, (name, series) in enumerate(picture.series.items()):
        color = COLORS[number % len(COLORS)]
        corners = " ".join(f"{place(x):.1f},{frame.place(y):.1f}" for x, y in series)
        drawn.append(
            f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
        drawn += [
            f'<circle cx="{place(x):.1f}" cy="{frame.place(y):.1f}" r="2.5" fill="{color}"/>'
            for x, y in series
        ]
        drawn.append(_key(number, name))
    return _svg(drawn)


def _bars(picture: Bars) -> str:
    names = list(dict.fromkeys(name for group in picture.groups.values() for name in group))
    values = [value for group in picture.groups.values() for value in group.values()]
    if not values:
        return ""
    frame = _Frame(max([*values, picture.reference or 0.0]))
    room = (WIDTH - LEFT - RIGHT) / len(picture.groups)
    width = room * 0.8 / len(names)
    drawn = [frame.axes(picture.title, picture.y_label, picture.reference)]
    for place, (group, bars) in enumerate(picture.groups.items()):
        start = LEFT + place * room
        drawn.append(_text(start + room / 2, HEIGHT - BOTTOM + 15, group, anchor="middle"))
        for name, value in bars.items():
            number = names.index(name)
            left, top = start + room * 0.1 + number * width, frame.place(value)
            drawn.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{COLORS[number % len(COLORS)]}"/>'
            )
    drawn += [_key(number, name) for number, name in enumerate(names)]
    return _svg(drawn)


class _Frame:
    """The vertical axis from 0 to what is needed."""

    def __init__(self, most: float) -> None:
        self._most = most * 1.05 or 1.0

    def place(self, value: float) -> float:
        """Where a value is drawn."""
        return HEIGHT - BOTTOM - value / self._most * (HEIGHT - TOP - BOTTOM)

    def axes(self, title: str, label: str, reference: float | None) -> str:
        """Title, axis with its ticks, and the reference level."""
        drawn = [
            _text(LEFT, 16, title, weight="bold"),
            _text(LEFT, TOP - 2, label),
            _line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM),
            _line(LEFT, TOP, LEFT, HEIGHT - BOTTOM),
        ]
        for tick in range(NUM_TICKS + 1):
            value = self._most * tick / NUM_TICKS
            drawn.append(_text(LEFT - 5, self.place(value) + 4, f"{value:.3g}", anchor="end"))
        if reference is not None:
            level = self.place(reference)
            drawn.append(_line(LEFT, level, WIDTH - RIGHT, level, dashes="4 3"))
        return "\n".join(drawn)


def _at(x: float, *, log: bool) -> float:
    return log10(x) if log else x


def _key(number: int, name: str) -> str:
    """A colour and what it stands for, on the right."""
    top = TOP + 16 * number
    color = COLORS[number % len(COLORS)]
    box = f'<rect x="{WIDTH - RIGHT + 12}" y="{top}" width="10" height="10" fill="{color}"/>'
    return box + _text(WIDTH - RIGHT + 27, top + 9, name)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, *, dashes: str = "none") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#666" '
        f'stroke-dasharray="{dashes}"/>'
    )


def _svg(drawn: Iterable[str]) -> str:
    inside = "\n".join(drawn)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">\n{inside}\n</svg>'
    )
