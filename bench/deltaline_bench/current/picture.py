"""The picked figures as an SVG, of text alone: the same figures give the same bytes wherever it is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from xml.sax.saxutils import escape

from deltaline_bench.current.picks import Pick
from deltaline_bench.current.records import Line
from deltaline_bench.current.tables import Table
from deltaline_bench.service.figure import tell

WIDTH, LEFT, TOP = 960, 300, 34
# Of a bar, of what is between two figures, and of the time of ours, which all are drawn by.
BAR, GAP, OURS = 13, 12, 140
COLOURS = {"ours": "#2458a6", "best peer": "#c0722a", "least": "#9aa3ad"}
TITLES = {"ours": "ours", "best peer": "best peer", "least": "the case's bytes at a copy's rate"}


def draw(picks: Iterable[Pick], tables: Mapping[str, Table]) -> str:
    """Return the picture: of each figure the time of ours, of its best peer and of its bytes, as shares of ours."""
    parts, y = list(_legend()), TOP
    for pick in picks:
        line, _ = pick.find(tables)
        bars = list(_bars(line))
        parts.append(_text(LEFT - 8, y + (len(bars) * BAR) / 2 + 4, pick.what, "end"))
        for kind, share, text in bars:
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{share * OURS:.1f}" height="{BAR - 2}" fill="{COLOURS[kind]}"/>'
            )
            parts.append(_text(LEFT + share * OURS + 5, y + BAR - 3, text))
            y += BAR
        y += GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *parts, "</svg>"]) + "\n"


def _bars(line: Line) -> Iterator[tuple[str, float, str]]:
    """Yield the bars of a figure: what it is, its share of ours, its text."""
    if not line.value:
        return
    yield "ours", 1.0, f"{tell(line.value)} {line.unit}"
    if line.peer is not None:
        yield "best peer", line.peer / line.value, f"{line.peer_name} {tell(line.peer)} {line.unit}"
    if line.least is not None:
        yield "least", line.least / line.value, f"{tell(line.least)} {line.unit}"


def _legend() -> Iterator[str]:
    for i, (kind, title) in enumerate(TITLES.items()):
        x = LEFT + 110 * i
        yield f'<rect x="{x}" y="10" width="11" height="11" fill="{COLOURS[kind]}"/>'
        yield _text(x + 16, 20, title)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
