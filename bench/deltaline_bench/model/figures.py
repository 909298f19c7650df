"""What a run found: its figures, their table and their picture. Measures nothing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltaline_bench.model.shapes import Bars
from deltaline_bench.plot import PlotUnavailable
from deltaline_cli.text import table


@dataclass(frozen=True)
class Decode:
    """A decode of `rows` rows: computation, the bytes that it must move and their time at a copy's bandwidth, and the
    products alone; None where they were not measured."""

    rows: int
    compute_ms: float
    num_bytes: int
    bytes_ms: float | None
    products_ms: float | None


@dataclass(frozen=True)
class Prefill:
    """A prefill of one row of `tokens` tokens, beside its products alone."""

    tokens: int
    compute_ms: float
    flops: int
    products_ms: float | None


@dataclass(frozen=True)
class Run:
    """One run. stages: seconds of each until the engine was ready; is_whole: whether all graphs of a server are in it.

    is_drawn: whether the weights were drawn. copy_bytes_per_s: None where bytes have no time, as on a CPU.
    """

    shape: str
    device: str
    date: str
    context: int
    decodes: tuple[Decode, ...]
    prefill: Prefill | None
    stages: dict[str, float]
    is_whole: bool
    is_drawn: bool
    copy_bytes_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """Read what `to_json` gave."""
        kept = dict(fields)
        decodes = tuple(Decode(**decode) for decode in kept.pop("decodes"))
        prefill = kept.pop("prefill")
        return cls(**kept, decodes=decodes, prefill=None if prefill is None else Prefill(**prefill))


@dataclass(frozen=True)
class Verdict:
    """One bar and what was measured."""

    name: str
    value: float
    limit: float
    is_least: bool
    is_aim: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        kind = "aim" if self.is_aim else "bar"
        return f"{self.name}: {self.value:.4g} {self.word} ({kind} {self.sign} {self.limit:g})"

    @property
    def word(self) -> str:
        return "met" if self.is_met else "MISSED"

    @property
    def sign(self) -> str:
        return ">=" if self.is_least else "<="

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        """Read what a verdict is as a text, its value as it was rounded. Raises ValueError."""
        found = re.fullmatch(r"(.+): (\S+) (?:met|MISSED) \((bar|aim) (>=|<=) (\S+)\)", text)
        if found is None:
            raise ValueError(f"not a verdict: {text}")
        name, value, kind, sign, limit = found.groups()
        return cls(name, float(value), float(limit), sign == ">=", kind == "aim")


def judge(run: Run, bars: Bars) -> Iterator[Verdict]:
    """Hold a run to its model's bars."""
    for decode in run.decodes:
        name = f"decode of {decode.rows}, ms"
        for limits, is_aim in ((bars.decode_ms, False), (bars.decode_aim_ms, True)):
            if decode.rows in limits:
                yield Verdict(name, decode.compute_ms, limits[decode.rows], is_least=False, is_aim=is_aim)
        if decode.rows in bars.bytes_share and decode.bytes_ms is not None:
            share = decode.bytes_ms / decode.compute_ms
            yield Verdict(f"decode of {decode.rows}, bytes / computation", share, bars.bytes_share[decode.rows], True)
    if run.prefill is not None and run.prefill.products_ms is not None:
        share, name = run.prefill.products_ms / run.prefill.compute_ms, "prefill, products / computation"
        for limit, is_aim in ((bars.prefill_share, False), (bars.prefill_aim, True)):
            if limit is not None:
                yield Verdict(name, share, limit, is_least=True, is_aim=is_aim)
    limit = bars.ready_s if run.is_drawn else bars.checkpoint_s
    if run.is_whole and limit is not None:
        yield Verdict("ready, s", sum(run.stages.values()), limit, is_least=False)


def write_table(run: Run) -> str:
    """The figures as tables whose columns line up."""
    rows = [("rows", "compute ms", "GB", "bytes ms", "products ms", "bytes/compute", "products/compute")]
    for one in run.decodes:
        shares = _share(one.bytes_ms, one.compute_ms), _share(one.products_ms, one.compute_ms)
        size = f"{one.num_bytes / 1e9:.2f}"
        rows.append((str(one.rows), f"{one.compute_ms:.3f}", size, _ms(one.bytes_ms), _ms(one.products_ms), *shares))
    lines = [f"{run.shape}, {run.device}, {run.date}: decodes behind {run.context} tokens", table(rows, align=">" * 7)]
    if run.prefill is not None:
        prefill, seconds = run.prefill, run.prefill.compute_ms / 1e3
        rate = f"{prefill.tokens / seconds:,.0f} tokens/s, {prefill.flops / seconds / 1e12:.0f} TFLOP/s"
        beside = f"products alone {_ms(prefill.products_ms)} ms, {_share(prefill.products_ms, prefill.compute_ms)}"
        lines.append(f"prefill of {prefill.tokens} tokens: {prefill.compute_ms:.2f} ms ({rate}); {beside}")
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run.stages.items())
    which = "" if run.is_whole else " (of graphs only those that are measured)"
    lines.append(f"ready after {sum(run.stages.values()):.1f} s{which}: {stages}")
    return "\n".join(lines)


def write_plot(run: Run, path: Path) -> None:
    """Draw the decodes: computation beside bytes and products. Raises PlotUnavailable."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotUnavailable(f"no plot: {error}") from error
    sides: dict[str, list[float]] = {
        "computation": [one.compute_ms for one in run.decodes],
        "products alone": [one.products_ms or 0.0 for one in run.decodes],
        "bytes at a copy's bandwidth": [one.bytes_ms or 0.0 for one in run.decodes],
    }
    figure = figures.Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for i, (label, values) in enumerate(sides.items()):
        bars = axes.bar([place + 0.27 * (i - 1) for place in range(len(run.decodes))], values, width=0.25, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(run.decodes)), [str(one.rows) for one in run.decodes])
    axes.set_xlabel("rows of a decode")
    axes.set_ylabel("median ms, less is better")
    axes.legend(fontsize=8)
    figure.suptitle(f"{run.shape}, {run.device}, {run.date}")
    with matplotlib.rc_context({"svg.hashsalt": run.shape}):  # the same figures give the same file
        figure.savefig(path, format="svg", metadata={"Date": None})


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(part: float | None, whole: float) -> str:
    return "-" if part is None else f"{part / whole:.3f}"
