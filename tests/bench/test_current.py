"""Current figures: which records count, how they are told, and that the pages tell what the records give."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rigs.bench_records import small_run

from deltaline_bench.current.files import PAGE, PICTURE, README, current_files, write_current
from deltaline_bench.current.page import write_page, write_picks
from deltaline_bench.current.picks import PICKS, Pick
from deltaline_bench.current.picture import draw
from deltaline_bench.current.records import read_record
from deltaline_bench.current.tables import RESULTS, read_tables
from deltaline_bench.model.figures import Run, Verdict
from deltaline_bench.service.figure import Bar, Figure, from_json, to_json

ROOT = Path(__file__).parents[2]
SUITE = "Kernels: conv1d, NVIDIA H200"


def keep(root: Path, name: str, record: dict[str, Any]) -> Path:
    """Write a record into a tree that has some of the benches."""
    (root / RESULTS).mkdir(parents=True, exist_ok=True)
    for bench in ("service.py", "mixer.py", "model.py"):
        (root / "bench" / bench).touch()
    path = root / RESULTS / f"{name}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def keep_suite(root: Path, name: str, date: str, **cases: float) -> None:
    """Write a run of a suite with these cases, their medians in us."""
    (case,) = small_run().cases
    made = [
        replace(case, name=name, sides=(replace(case.sides[0], median_us=us), *case.sides[1:]))
        for name, us in cases.items()
    ]
    keep(root, name, json.loads(replace(small_run(), date=date, cases=tuple(made)).to_json()))


def service_record(date: str, *figures: Figure) -> dict[str, Any]:
    fields = {"command": "python bench/service.py --size cpu", "date": date, "device": "AMD EPYC", "versions": {}}
    return fields | {"size": {"name": "cpu"}, "figures": to_json(figures)}


@pytest.mark.parametrize("path", [PAGE, PICTURE, README], ids=str)
def test_pages_tell_what_the_records_give(path: Path) -> None:
    expected = current_files(ROOT)[path]
    assert (ROOT / path).read_text(encoding="utf-8") == expected, "run `python -m deltaline_bench figures`"


def test_a_wrong_figure_is_found_and_mended(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("deltaline_bench"))
    (tmp_path / "docs").mkdir()
    for path in (PAGE, PICTURE, README):
        right = (ROOT / path).read_text(encoding="utf-8")
        assert "581.5 us" in right
        (tmp_path / path).write_text(right.replace("581.5 us", "481.5 us"), encoding="utf-8")
    for path, content in current_files(tmp_path).items():
        assert (tmp_path / path).read_text(encoding="utf-8") != content
    write_current(tmp_path)
    for path in (PAGE, PICTURE, README):
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes()


def test_newest_whole_run_counts_and_of_partial_ones_what_no_whole_one_has(tmp_path: Path) -> None:
    keep_suite(tmp_path, "2026-01-01-h200-conv1d", "2026-01-01", a=1, b=2, retired=3)
    keep_suite(tmp_path, "2026-01-02-h200-conv1d", "2026-01-02", a=4, b=5)
    keep_suite(tmp_path, "2026-01-03-h200-conv1d-partial", "2026-01-03", a=6, new=7)
    keep_suite(tmp_path, "2026-01-04-h200-conv1d-partial", "2026-01-04", new=8)
    lines = read_tables(tmp_path)[SUITE].lines
    assert [(line.case, line.value, record.date) for line, record in lines] == [
        ("a", 4, "2026-01-02"),
        ("b", 5, "2026-01-02"),
        ("new", 8, "2026-01-04"),
    ]


def test_newest_of_each_figure_of_the_service_counts(tmp_path: Path) -> None:
    one, other = (Figure("decode", name, 1.0, "us", "raw") for name in ("one", "other"))
    keep(tmp_path, "2026-01-01-cpu-link", service_record("2026-01-01", one, other))
    keep(tmp_path, "2026-01-02-cpu-tls", service_record("2026-01-02", replace(one, value=2.0)))
    (table,) = read_tables(tmp_path).values()
    assert table.name == "Service, size cpu, CPU"
    assert [(line.case, line.value) for line, _ in table.lines] == [
        ("decode: one (raw)", 2.0),
        ("decode: other (raw)", 1.0),
    ]


def test_records_of_benches_that_are_no_more_are_left_out_and_unknown_ones_refused(tmp_path: Path) -> None:
    gone = {"command": "python bench/overhead.py", "milliseconds": {}}
    assert read_record(keep(tmp_path, "gone", gone), tmp_path / "bench") is None
    assert read_record(keep(tmp_path, "planted", {"bugs": []}), tmp_path / "bench") is None
    unknown = keep(tmp_path, "unknown", {"command": "python bench/mixer.py", "what": 1})
    with pytest.raises(ValueError, match=r"unknown\.json: no bench is known"):
        read_record(unknown, tmp_path / "bench")


def test_a_case_is_told_with_peer_least_bar_and_what_went_wrong(tmp_path: Path) -> None:
    keep_suite(tmp_path, "2026-01-01-h200-conv1d", "2026-01-01", prefill=140)
    tables = read_tables(tmp_path)
    page = write_page(tables.values(), [tmp_path / RESULTS / "2026-01-01-h200-more.txt"])
    assert "| prefill | 140 us | 124.9 us | SGLang 206 us |       1.47x | >= 85% of copy met |" in page
    assert (
        "- [2026-01-01](../bench/results/2026-01-01-h200-conv1d.json): NVIDIA H200; torch 2.11.0; beside sglang" in page
    )
    assert "- 2026-01-01: [h200-more.txt](../bench/results/2026-01-01-h200-more.txt)" in page
    assert "SGLang 206 us" in write_picks([Pick("what", SUITE, "prefill")], tables)
    with pytest.raises(ValueError, match="no record has the case gone"):
        write_picks([Pick("what", SUITE, "gone")], tables)


def test_model_is_told_with_its_verdicts() -> None:
    (path,) = (ROOT / RESULTS).glob("2026-11-28-h200-model-27b.json")
    record = read_record(path, ROOT / "bench")
    assert record is not None and not record.is_whole
    bars = {line.case: line.bars for line in record.lines}
    assert bars["decode of 1 row"] == "<= 13.6 ms MISSED"
    assert bars["prefill of 8,192 tokens"] == "products / computation >= 0.8 met"


def test_what_is_kept_is_read_back() -> None:
    figures = [
        Figure("part", "a", None, "us", "raw", Bar(9215.2), "why not"),
        Figure("part", "b", 1.0, "", "", Bar(0.5, is_least=True)),
        Figure("part", "c", 1.0, "", ""),
    ]
    assert from_json(to_json(figures)) == figures
    verdict = Verdict("decode of 1, bytes / computation", 0.5, 0.45, is_least=True, is_aim=True)
    assert Verdict.from_text(str(verdict)) == verdict
    with pytest.raises(ValueError, match="not a verdict"):
        Verdict.from_text("decode of 1: quick")
    for path in (ROOT / RESULTS).glob("*-model-*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))["run"]
        assert json.loads(json.dumps(Run.from_json(kept).to_json())) == kept


def test_picture_draws_each_pick_to_scale() -> None:
    root = ElementTree.fromstring(draw(PICKS[:1], read_tables(ROOT)))
    ours, peer, _ = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][-3:]
    assert peer / ours == pytest.approx(1875 / 581.5, rel=0.01)
