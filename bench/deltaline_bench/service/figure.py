"""What the service is judged by: figures with their bars, their table and their record. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltaline_cli.text import table


@dataclass(frozen=True)
class Bar:
    """The most (or least) that a figure may be."""

    limit: float
    is_least: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.limit:,g}"

    def is_met(self, value: float) -> bool:
        """Say whether `value` keeps to the bar; NaN does not."""
        return value >= self.limit if self.is_least else value <= self.limit

    @classmethod
    def from_text(cls, text: str) -> Bar:
        """Read what a bar is as a text."""
        sign, limit = text.split()
        return cls(float(limit.replace(",", "")), sign == ">=")


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    value: None where it could not be measured, and `note` says why: with a bar that is a miss. seen_by: how it was
    measured: "raw" (bytes that were serialised before), "client" (the Python client), "engine", "metrics" or "process".
    """

    part: str
    name: str
    value: float | None
    unit: str
    seen_by: str
    bar: Bar | None = None
    note: str = ""

    @property
    def is_missed(self) -> bool:
        """Whether the figure has a bar that it does not keep to."""
        return self.bar is not None and (self.value is None or not self.bar.is_met(self.value))

    @property
    def verdict(self) -> str:
        """What the table's last column says."""
        if self.bar is None:
            return ""
        return "MISSED" if self.is_missed else "met"


def missed(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures that make the run fail."""
    return [figure for figure in figures if figure.is_missed]


def write_table(figures: Sequence[Figure]) -> str:
    """Return the figures as a table whose columns line up; notes follow in parentheses."""
    rows = [("part", "figure", "value", "unit", "seen by", "bar", "", "")]
    for figure in figures:
        value = "-" if figure.value is None else tell(figure.value)
        bar = "" if figure.bar is None else str(figure.bar)
        note = f"({figure.note})" if figure.note else ""
        rows.append((figure.part, figure.name, value, figure.unit, figure.seen_by, bar, figure.verdict, note))
    return table(rows, align="<<><<<<<")


def tell(value: float) -> str:
    """Return a value in four digits, or all before the point where there are more."""
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return the figures as JSON has them."""
    return [
        asdict(figure) | {"bar": None if figure.bar is None else str(figure.bar), "verdict": figure.verdict}
        for figure in figures
    ]


def from_json(records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Read what `to_json` gave; a verdict follows from its bar."""
    figures = []
    for record in records:
        fields = {name: value for name, value in record.items() if name != "verdict"}
        bar = None if fields["bar"] is None else Bar.from_text(fields["bar"])
        figures.append(Figure(**fields | {"bar": bar}))
    return figures
