"""A kept record as lines of one table, whatever bench it is of. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaline_bench.model.figures import Run, Verdict
from deltaline_bench.record import PARTIAL, CaseRecord, RunRecord, Status
from deltaline_bench.report import tell_bars
from deltaline_bench.service import figure as service
from deltaline_cli.text import plural

PRODUCTS = "torch, its products alone"


@dataclass(frozen=True)
class Line:
    """One figure.

    Args:
        value: None where it was not measured, and `note` says why.
        least: the time of its bytes at the rate of a copy in the same run.
        peer: the best peer's, of the name behind it.
    """

    case: str
    value: float | None
    unit: str
    least: float | None = None
    peer: float | None = None
    peer_name: str = ""
    bars: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The best peer's time / ours."""
        return self.peer / self.value if self.peer is not None and self.value else None


@dataclass(frozen=True)
class Record:
    """One file.

    Args:
        table: the heading that its lines are under. ran_on: device and versions, in words.
        is_whole: whether it has all that its bench measures; one of a few cases, parts or sizes has not.
    """

    path: Path
    table: str
    date: str
    ran_on: str
    is_whole: bool
    lines: tuple[Line, ...]


def read_record(path: Path, benches: Path) -> Record | None:
    """Read one file; None where it has no figures, or the bench that wrote it is no more in the folder `benches`.

    Raises:
        ValueError: no bench is known that writes such a record.
    """
    text = path.read_text(encoding="utf-8")
    fields: dict[str, Any] = json.loads(text)
    if "cases" in fields:
        return _read_suite(path, RunRecord.from_json(text))
    if "bugs" in fields:  # that were planted to try the tests
        return None
    script = benches / Path(fields["command"].split()[1]).name
    if not script.exists():
        return None
    lines: Iterator[Line]
    if "run" in fields:
        run = Run.from_json(fields["run"])
        table, lines = f"Model {run.shape}", _of_model(run, fields["verdicts"])
    elif "size" in fields:
        table, lines = f"{script.stem.capitalize()}, size {fields['size']['name']}", _of_service(fields["figures"])
    elif "error_ratio" in fields:
        table, lines = "Error in bf16", _of_accuracy(fields)
    elif "ratios" in fields:
        table, lines = "One mixer beside transformers", _of_mixer(fields)
    else:
        raise ValueError(f"{path.name}: no bench is known that writes such a record")
    is_whole = not {"run", "size"} & fields.keys()
    machine: str = fields.get("device") or fields["machine"]
    table += f", {machine}" if machine.startswith("NVIDIA") else ", CPU"
    return Record(path, table, fields["date"], _in_words(machine, fields["versions"]), is_whole, tuple(lines))


def _read_suite(path: Path, run: RunRecord) -> Record:
    device = dict(run.device)
    ran_on = _in_words(device.pop("name"), device)
    timed = {side.name.partition(",")[0] for case in run.cases for side in case.sides if side.median_us is not None}
    named = {name.lower().replace("-", "_") for name in timed}
    peers = [f"{name} ({version})" for name, version in run.peers.items() if name.lower().replace("-", "_") in named]
    ran_on += f"; beside {', '.join(peers)}" if peers else ""
    lines = tuple(_of_case(case, run.copy_bytes_per_s) for case in run.cases)
    return Record(
        path, f"Kernels: {run.suite}, {run.device['name']}", run.date, ran_on, not path.stem.endswith(PARTIAL), lines
    )


def _of_case(case: CaseRecord, copy_bytes_per_s: float) -> Line:
    best = next((side for side in case.sides if side.name == case.best_peer), None)
    return Line(
        case.name,
        case.judged.median_us,
        "us",
        least=case.num_bytes / copy_bytes_per_s * 1e6,
        peer=None if best is None else best.median_us,
        peer_name="" if best is None else best.name,
        bars=tell_bars(case, is_needed=True),
        note="" if case.judged.status is Status.RIGHT else case.judged.status,
    )


def _of_model(run: Run, texts: Sequence[str]) -> Iterator[Line]:
    verdicts = [Verdict.from_text(text) for text in texts]

    def bars(case: str) -> str:
        """Tell the bars of a case: its verdicts are `decode of 64, ms` and `decode of 64, bytes / computation`."""
        told = []
        for one in verdicts:
            name, _, what = one.name.partition(", ")
            if name == case and not one.is_aim:
                unit, share = (what, "") if what in ("ms", "s") else ("", what)
                told.append(f"{share} {one.sign} {one.limit:g} {unit}".strip() + f" {one.word}")
        return ", ".join(told)

    for one in run.decodes:
        case = f"decode of {one.rows}"
        yield Line(
            f"{case} {plural(one.rows, 'row')}",
            one.compute_ms,
            "ms",
            one.bytes_ms,
            one.products_ms,
            PRODUCTS,
            bars(case),
        )
    if run.prefill is not None:
        case = f"prefill of {run.prefill.tokens:,} tokens"
        yield Line(case, run.prefill.compute_ms, "ms", None, run.prefill.products_ms, PRODUCTS, bars("prefill"))
    if run.is_whole:
        yield Line("ready", sum(run.stages.values()), "s", bars=bars("ready"))


def _of_service(records: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    for figure in service.from_json(records):
        bar = "" if figure.bar is None else f"{figure.bar} {figure.verdict}"
        case = f"{figure.part}: {figure.name} ({figure.seen_by})"
        yield Line(case, figure.value, figure.unit, bars=bar, note=figure.note)


def _of_accuracy(fields: Mapping[str, Any]) -> Iterator[Line]:
    yield Line("error against fp32, the largest of all / transformers' own", fields["error_ratio"], "")
    for weights, figures in fields["figures"].items():
        yield from (Line(f"{weights}: {name.replace('_', ' ')}", value, "") for name, value in figures.items())


def _of_mixer(fields: Mapping[str, Any]) -> Iterator[Line]:
    for case, sides in fields["milliseconds"].items():
        yield Line(case, sides["deltaline"], "ms", None, sides["transformers"], "transformers")


def _in_words(device: str, versions: Mapping[str, str]) -> str:
    return "; ".join((device, ", ".join(f"{name} {version}" for name, version in versions.items())))
