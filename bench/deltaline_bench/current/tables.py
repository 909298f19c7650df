"""The newest lines of every table. Reads the folder of records; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltaline_bench.current.records import Line, Record, read_record

RESULTS = Path("bench/results")


@dataclass(frozen=True)
class Table:
    """The current lines under one heading, each with the record that it is from."""

    name: str
    lines: tuple[tuple[Line, Record], ...]

    @property
    def records(self) -> list[Record]:
        """Those that a line is from, in the order of their first lines."""
        return list({record.path: record for _, record in self.lines}.values())

    def find(self, case: str) -> tuple[Line, Record]:
        """Find a line by its case. Raises KeyError."""
        return {line.case: (line, record) for line, record in self.lines}[case]


def read_tables(root: Path) -> dict[str, Table]:
    """Choose the current lines of each table, by its name, from bench/results of a tree."""
    found: dict[str, list[Record]] = {}
    for path in (root / RESULTS).glob("*.json"):
        record = read_record(path, root / "bench")
        if record is not None:
            found.setdefault(record.table, []).append(record)
    return {name: Table(name, tuple(choose(found[name]))) for name in sorted(found)}


def choose(records: Sequence[Record]) -> Iterator[tuple[Line, Record]]:
    """Yield the current lines of one table: those of the newest whole record, and of the others, newest first, what no
    whole one has."""
    by_age = sorted(records, key=lambda record: (record.date, record.path.stem), reverse=True)
    whole = [record for record in by_age if record.is_whole]
    told = set[str]()
    for record in whole[:1]:
        yield from ((line, record) for line in record.lines)
    told.update(line.case for record in whole for line in record.lines)
    for record in by_age:
        if not record.is_whole:
            yield from ((line, record) for line in record.lines if line.case not in told)
            told.update(line.case for line in record.lines)
