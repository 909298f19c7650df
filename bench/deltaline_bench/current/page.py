"""Tables of current figures in Markdown: the page of all, and the few that the README has. Reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deltaline_bench.current.picks import Pick
from deltaline_bench.current.records import Line, Record
from deltaline_bench.current.tables import Table
from deltaline_bench.report import table
from deltaline_bench.service.figure import tell

HEAD = """\
# Figures

All figures that a record under [bench/results](../bench/results) has as JSON: of each table the newest whole run; of
runs of a few cases, sizes or parts the newest that has the case, where no whole run has it. `python -m
deltaline_bench figures` writes this page, its [picture](figures.svg) and the table of the
[README](../README.md#figures), and a test fails where they are not what the records give. A figure stays until it is
measured anew, though what it measured may have changed: its date tells. What was measured without such a record,
often later, is in the [log](log.md) and under [other records](#other-records), and not here.

- least: the least bytes of the case at the rate of a copy in the same run; what computes for longer has another limit.
- best peer: the fastest that was right, in turns with ours in the same run; where it is a side of ours, such as the
  decode beside a verify, it is what the case adds to.
- peer / ours: how many times ours the peer takes.
- bar: what the run had to reach, and whether it did.
"""
OTHERS = "## Other records\n\nText, older runs, and records of benches that are no more; the log tells what they say.\n"


def write_page(tables: Iterable[Table], others: Sequence[Path]) -> str:
    """Return the page, which lies in docs/. others: files of records that no line is from."""
    return "\n".join([HEAD, *(_section(one) for one in tables), OTHERS, *_list(others)]) + "\n"


def write_picks(picks: Iterable[Pick], tables: Mapping[str, Table]) -> str:
    """Return the table of a few figures, for a page beside bench/."""
    rows = []
    for pick in picks:
        line, record = pick.find(tables)
        cells = _cells(line)
        shown = (cells[name] or "-" for name in ("ours", "least", "best peer", "peer / ours", "bar"))
        rows.append([pick.what, *shown, _link(record, "")])
    return "\n".join(table(("what", "ours", "least", "best peer", "peer / ours", "bar", "measured"), rows)) + "\n"


def _section(one: Table) -> str:
    """Return a table under its heading, without columns that are empty; of one record alone, it is told once."""
    is_mixed = len(one.records) > 1
    rows = [_cells(line) | {"measured": _link(record, "../") if is_mixed else ""} for line, record in one.lines]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    is_timed = {"least", "best peer"} & set(columns)
    headings = ["value" if name == "ours" and not is_timed else name for name in columns]
    cells = [[row[name] for name in columns] for row in rows]
    ran_on = [f"- {_link(record, '../')}: {record.ran_on}" for record in one.records]
    return "\n".join([f"## {one.name}", "", *ran_on, "", *table(headings, cells), ""])


def _cells(line: Line) -> dict[str, str]:
    peer = _time(line.peer, line.unit)
    return {
        "case": line.case,
        "ours": _time(line.value, line.unit) or "-",
        "least": _time(line.least, line.unit),
        "best peer": f"{line.peer_name} {peer}" if peer else "",
        "peer / ours": "" if line.ratio is None else f"{line.ratio:.2f}x",
        "bar": line.bars,
        "note": line.note,
    }


def _time(value: float | None, unit: str) -> str:
    return "" if value is None else f"{tell(value)} {unit}".strip()


def _link(record: Record, root: str) -> str:
    return f"[{record.date}]({root}bench/results/{record.path.name})"


def _list(others: Sequence[Path]) -> list[str]:
    """Return links to files, newest day first, a day in a line."""
    days: dict[str, list[str]] = {}
    for path in others:
        days.setdefault(path.name[:10], []).append(f"[{path.name[11:]}](../bench/results/{path.name})")
    return [f"- {day}: {', '.join(days[day])}" for day in sorted(days, reverse=True)]
