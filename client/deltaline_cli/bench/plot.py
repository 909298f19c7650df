"""The latencies of a bench as a picture: a curve over the percentiles for each kind, as SVG. Needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from deltaline_cli.bench.report import Report

# From the median on, ever closer to the slowest step.
_TAIL = np.array([50, 75, 90, 95, 99, 99.5, 99.9])


class PlotUnavailable(Exception):
    """matplotlib cannot be imported."""


def write_plot(report: Report, path: Path) -> None:
    """Draw the total of each kind by percentile, and the median stages beside it.

    Raises: PlotUnavailable, OSError.
    """
    try:
        # By name: matplotlib is optional, also for the type checker.
        matplotlib: Any = importlib.import_module("matplotlib")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotUnavailable(f"no plot: {error}") from error
    figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    for index, kind in enumerate(report.kinds):
        stages_s = report.samples.stages_s(kind)
        curves.plot(range(len(_TAIL)), np.percentile(stages_s["total"], _TAIL) * 1e3, marker=".", label=kind)
        left = 0.0
        for number, stage in enumerate(stage for stage in report.stages if stage != "total"):
            median_ms = (report.percentiles_ms(kind, stage) or [0.0])[0]
            bars.barh(index, median_ms, left=left, color=f"C{number}", label=stage if index == 0 else None)
            left += median_ms
    curves.set_xticks(range(len(_TAIL)), [f"p{value:g}" for value in _TAIL])
    curves.set_ylabel("total, ms")
    curves.set_yscale("log")
    curves.legend()
    bars.set_yticks(range(len(report.kinds)), report.kinds)
    bars.set_xlabel("median of each stage, ms")
    bars.legend()
    # The same report gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "deltaline"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
