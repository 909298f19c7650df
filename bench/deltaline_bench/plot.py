"""A run as a picture: a bar for each side of each case, as an SVG file. Needs matplotlib; measures nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from deltaline_bench.record import CaseRecord, RunRecord, SideRecord

BAR_INCHES = 0.22
# A case that takes less is bound by its launch: its time says more than its bandwidth.
SMALL_US = 60.0


class PlotUnavailable(Exception):
    """matplotlib cannot be imported."""


def write_plot(run: RunRecord, path: Path) -> None:
    """Draw the share of copy of the large cases beside the times of the small ones.

    Raises:
        PlotUnavailable: matplotlib is not installed.
    """
    try:
        # By name: matplotlib is optional, also for the type checker.
        matplotlib: Any = importlib.import_module("matplotlib")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotUnavailable(f"no plot: {error}") from error
    timed = [case for case in run.cases if case.judged.median_us is not None]
    small = [case for case in timed if (case.judged.median_us or 0.0) < SMALL_US]
    large = [case for case in timed if case not in small]
    names = list(dict.fromkeys(side.name for case in run.cases for side in case.sides))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    panels = [(cases, in_us) for cases, in_us in ((large, False), (small, True)) if cases]
    if not panels:
        raise PlotUnavailable("no plot: no case was timed")
    tallest = max(sum(_num_bars(case) + 1 for case in cases) for cases, _ in panels)
    figure = figures.Figure(figsize=(7.5 * len(panels), 1.4 + BAR_INCHES * tallest), layout="constrained")
    for axes, (cases, in_us) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, cases, colours, in_us=in_us)
    # One entry per side, whichever panels it is in.
    handles = {label: bar for axes in figure.axes for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(f"{run.suite}, {run.device.get('name', '')}, {run.date}")
    # The same record gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": run.suite}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _num_bars(case: CaseRecord) -> int:
    return sum(side.median_us is not None for side in case.sides)


def _draw(axes: Any, cases: list[CaseRecord], colours: dict[str, str], *, in_us: bool) -> None:
    """Draw one panel: the cases downwards, in each its sides."""
    height, ticks, labelled = 0, [], set()
    for case in cases:
        sides = [side for side in case.sides if side.median_us is not None]
        ticks.append(height + (len(sides) - 1) / 2)
        for side in sides:
            value = _value(side, in_us=in_us)
            label = None if side.name in labelled else side.name
            labelled.add(side.name)
            axes.barh(height, value, height=0.85, color=colours[side.name], label=label)
            axes.text(value, height, f" {value:.1f}", va="center", fontsize=7)
            height += 1
        height += 1
    axes.set_yticks(ticks, [case.name for case in cases])
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("median us, less is better" if in_us else "% of the copy bandwidth of the same run")


def _value(side: SideRecord, *, in_us: bool) -> float:
    return (side.median_us or 0.0) if in_us else (side.share_of_copy or 0.0) * 100
