"""The cases of hyper-connections on small shapes: work counted by hand, our sides agree with the bench's own truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.fakes import FakeTimer

from deltaline_bench.__main__ import main
from deltaline_bench.bar import Kind
from deltaline_bench.measurement import measure_case
from deltaline_bench.mhc.batch import FUSED, HEAD, POST, PRE, Batch, Shape
from deltaline_bench.mhc.cases import ROWS, SUITE, Row
from deltaline_bench.mhc.field import peers
from deltaline_bench.mhc.sides import field_side
from deltaline_bench.peers import Peers
from deltaline_bench.record import RunRecord, Status
from deltaline_kernels import Gates, compat, mhc_post_pre_reference

CPU = torch.device("cpu")
WORKS = {POST: 2, PRE: 2, FUSED: 2, HEAD: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("work", WORKS)
def test_our_sides_agree_with_the_truth_of_the_bench(work: str, dtype: torch.dtype) -> None:
    row = Row(work, Shape(work, 270, 24, 3, dtype))
    record = measure_case(row(CPU, Peers()), FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    own = [side for side in record.sides if side.is_ours]
    assert len(own) == WORKS[work] and all(side.status is Status.RIGHT for side in own), own


def test_truth_agrees_with_the_kernels_reference() -> None:
    batch = Batch(Shape(FUSED, 20, 24, 3, torch.float32), "reference", CPU)
    gates = Gates(batch.weight, batch.scale, batch.base)
    want = mhc_post_pre_reference(
        batch.x, batch.residual, batch.post, batch.comb, gates, norm_weight=batch.norm, norm_eps=1e-6
    )
    for got, one in zip(batch.expected().values(), want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)


def test_least_work_is_counted() -> None:
    # 10 tokens of 3 streams of 24 channels; 3 + 9 gates of a token and 15 products.
    post, pre, both, head = (Shape(work, 10, 24, 3, torch.float32) for work in WORKS)
    gates, weight = 4 * 10 * 12, 4 * 15 * 72
    assert post.num_bytes() == 4 * 10 * 24 * 7 + gates
    assert pre.num_bytes() == 4 * 10 * 24 * 4 + gates + weight
    assert both.num_bytes() == 4 * 10 * 24 * 8 + 2 * gates + weight + 4 * 24
    assert head.num_bytes() == 4 * 10 * 24 * 4 + 4 * 3 * 72
    assert both.num_flops() == post.num_flops() + pre.num_flops() > head.num_flops() > 0


def test_cases_have_their_own_names_and_the_bars_of_the_table() -> None:
    assert [row.name for row in ROWS] == [*dict.fromkeys(row.name for row in ROWS)] == list(SUITE.cases)
    figures = {row.name: row.needed[0].value for row in ROWS if row.needed}
    assert figures == {
        "post-4096x4096": 78,
        "post-8192x7168": 260,
        "post-1x4096": 5.0,
        "post-64x4096": 5.7,
        "pre-1x4096": 14,
        "pre-64x4096": 16,
        "pre-4096x4096": 85,
        "pre-4096x7168": 148,
        "fused-64x4096": 18,
    }
    for row in ROWS:
        for needed, aim in zip(row.needed, row.aim, strict=False):
            assert needed.kind is aim.kind is Kind.TIME and aim.value < needed.value, row.name


def test_the_fields_functions_are_called_as_the_field_calls_them() -> None:
    """Those of FlagGems take what ours of the same names do."""
    for work in (POST, PRE):
        batch = Batch(Shape(work, 5, 24, 4), work, CPU)
        side = field_side(batch, compat.mhc_post, compat.mhc_pre)
        for name, got in side.outputs(side.call()).items():
            torch.testing.assert_close(got.float(), batch.expected()[name], rtol=2e-2, atol=2e-2)


def test_peers_that_are_not_installed_are_rows_of_the_report() -> None:
    shape = Shape(POST, 5, 24)
    record = measure_case(Row("one", shape)(CPU, Peers()), FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)
    others = [side for side in record.sides if not side.is_ours]
    assert {side.name for side in others} == set(peers(Batch(shape, "one", CPU), Peers()))
    assert all(side.status in (Status.MISSING, Status.FAILED) for side in others)


@pytest.mark.gpu
def test_suite_runs_end_to_end(tmp_path: Path) -> None:
    arguments = ["mhc", "--case", "pre-1x4096", "--case", "fused-64x4096", "--rounds", "3", "--output", str(tmp_path)]
    assert main(arguments) in (0, 1)
    (path,) = tmp_path.glob("*-mhc-partial.json")
    for case in RunRecord.from_json(path.read_text(encoding="utf-8")).cases:
        assert case.judged.status is Status.RIGHT, case.judged
        assert case.judged.is_captured
