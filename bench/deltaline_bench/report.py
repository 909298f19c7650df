"""The Markdown report of a run: what it ran on, a table that lines up, and what was missed. Reads records only."""

from __future__ import annotations

from collections.abc import Sequence

from deltaline_bench.record import BarRecord, CaseRecord, RunRecord, SideRecord, Status

COLUMNS = ("case", "side", "us", "p10..p90", "GB/s", "of copy", "error", "how", "/ ours", "needed", "aim")
LEGEND = (
    "us: median, beside its 10th and 90th percentile. GB/s: the least bytes of the case in that time. of copy: its "
    "share\nof the copy above. error: relative norm of the difference to fp32. how: replays of a CUDA graph, or eager "
    "calls.\n/ ours: times the median of the first side."
)
RIGHT_ALIGNED = {"us", "p10..p90", "GB/s", "of copy", "error", "/ ours", "ours", "value", "least", "peer / ours"}


def write_report(run: RunRecord) -> str:
    """Return the report in Markdown."""
    device = dict(run.device)
    lines = [
        f"# {run.suite}, {device.pop('name', 'unknown device')}, {run.date}",
        "",
        ", ".join(f"{name} {version}" for name, version in device.items()) + f"; {run.rounds} rounds in turns.",
        "",
        f"Floor {run.floor_us:.2f} us, copy {run.copy_bytes_per_s / 1e12:.3f} TB/s, "
        f"read {run.read_bytes_per_s / 1e12:.3f} TB/s.",
        "",
        "Peers: " + ", ".join(f"{name} ({version})" for name, version in run.peers.items()) + ".",
        "",
        *table(COLUMNS, [row for case in run.cases for row in _rows(case)]),
        "",
        LEGEND,
        "",
        *_notes(run),
    ]
    return "\n".join(lines) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay a Markdown table out so that its columns line up as plain text as well."""
    cells = [columns, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [name in RIGHT_ALIGNED for name in columns]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)]
    return [line(columns), line(rule), *(line(row) for row in rows)]


def summary(case: CaseRecord) -> str:
    """Say in one line how a case went."""
    sides = [f"{side.name} {_number(side.median_us, '.2f', ' us') or side.status}" for side in case.sides]
    missed = case.failures()
    return f"{case.name}: {', '.join(sides)}" + (f"; {'; '.join(missed)}" if missed else "")


def _rows(case: CaseRecord) -> list[list[str]]:
    rows = []
    for side in case.sides:
        is_judged = side is case.judged
        rows.append(
            [
                case.name if is_judged else "",
                side.name,
                *_figures(side),
                _how(side),
                "" if is_judged else _number(side.speedup, ".2f", "x"),
                tell_bars(case, is_needed=True) if is_judged else "",
                tell_bars(case, is_needed=False) if is_judged else "",
            ]
        )
    return rows


def _figures(side: SideRecord) -> list[str]:
    spread = "" if side.p10_us is None or side.p90_us is None else f"{side.p10_us:.2f}..{side.p90_us:.2f}"
    is_nan = side.is_captured is not None and side.error is None
    return [
        _number(side.median_us, ".2f"),
        spread,
        _number(side.gigabytes_per_s, ".0f"),
        _number(None if side.share_of_copy is None else side.share_of_copy * 100, ".1f", "%"),
        "NaN" if is_nan else _number(side.error, ".1e"),
    ]


def _how(side: SideRecord) -> str:
    """Say how a side was timed, or why it was not."""
    how = "" if side.is_captured is None else "graph" if side.is_captured else "eager"
    return how if side.status is Status.RIGHT else f"{side.status} {how}".strip()


def tell_bars(case: CaseRecord, *, is_needed: bool) -> str:
    """Say of the needed bars, or of the aims, whether they were met."""
    return ", ".join(f"{bar.text} {_verdict(bar)}" for bar in case.bars if bar.is_needed == is_needed)


def _verdict(bar: BarRecord) -> str:
    if bar.is_met is None:
        return "(no peer)"
    return "met" if bar.is_met else "MISSED"


def _notes(run: RunRecord) -> list[str]:
    """List the cases in words, what was said of sides, and the verdict."""
    lines = [f"- {case.name}: {case.what}; {_shapes(case)}" for case in run.cases] + [""]
    details = [
        f"- {case.name}, {side.name}: {side.status}, {side.detail}"
        for case in run.cases
        for side in case.sides
        if side.detail and side.detail != side.status
    ]
    lines += [*details, ""] if details else []
    failures = run.failures()
    if failures:
        return [*lines, "Missed or wrong:", "", *(f"- {what}" for what in failures)]
    unjudged = sum(bar.is_needed and bar.is_met is None for case in run.cases for bar in case.bars)
    verdict = f"; {unjudged} could not be judged without a peer." if unjudged else "."
    return [*lines, f"No needed bar is missed{verdict}"]


def _shapes(case: CaseRecord) -> str:
    shapes = ", ".join(f"{name} {value}" for name, value in case.shapes.items())
    return f"{shapes}; {case.dtype}, {case.num_bytes / 1e6:.1f} MB at least, errors up to {case.max_error:.0e}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
