"""The cases of attention on small shapes: work counted by hand, our side agrees with the bench's own truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench.fakes import FakeTimer

from deltaline_bench.attention.batch import Batch
from deltaline_bench.attention.cases import RAGGED, ROWS, SHORT, SUITE, Row
from deltaline_bench.attention.shape import Shape
from deltaline_bench.attention.sides import sdpa
from deltaline_bench.bar import Kind
from deltaline_bench.case import NotApplicable
from deltaline_bench.measurement import measure_case
from deltaline_bench.peers import Peers
from deltaline_bench.record import Status

CPU = torch.device("cpu")
SMALL = Shape((1, 130, 65, 64), 1, 4, 2, 32, 16, dtype=torch.float32)
SHAPES = {
    "ragged": SMALL,
    "verify": replace(SMALL, lengths=(70, 70), tokens=3, soft_cap=2.0),
    "window": replace(SMALL, lengths=(200, 50), window=20),
    "plain": replace(SMALL, lengths=(96, 96), is_causal=False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_our_side_agrees_with_the_truth_of_the_bench(name: str) -> None:
    # PyTorch's compiled side takes a compiler.
    case = replace(Row(name, "small", SHAPES[name])(CPU, Peers()), peers={}, max_error=1e-5)
    record = measure_case(case, FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    assert record.judged.status is Status.RIGHT, record.judged


def test_a_window_is_compared_with_rows_of_its_length() -> None:
    row = Row("window", "small", SHAPES["window"], against=replace(SMALL, lengths=(20, 20)))
    record = measure_case(row(CPU, Peers()), FakeTimer(2.0), copy_bytes_per_s=1e12, rounds=1)
    beside = [side for side in record.sides if side.name == SHORT]
    assert [side.status for side in beside] == [Status.RIGHT]


def test_sdpa_agrees_with_the_truth_and_has_no_modifiers() -> None:
    batch = Batch(SHAPES["plain"], "plain", CPU)
    side = sdpa(batch)
    torch.testing.assert_close(side.outputs(side.call())["o"], batch.expected()["o"])
    for name in ("ragged", "verify", "window"):
        with pytest.raises(NotApplicable):
            sdpa(Batch(SHAPES[name], name, CPU))


def test_work_is_counted_by_hand() -> None:
    shape = Shape((100, 7), 2, 4, 2, 32)
    # Keys and values of 107 positions, 4 tokens of queries and outputs, 2 bytes each.
    assert shape.num_bytes == (2 * 107 * 2 * 32 + 2 * 4 * 4 * 32) * 2
    assert shape.num_flops == 4 * 107 * 2 * 4 * 32
    assert Shape((100, 7), window=10).num_seen == 17
    assert RAGGED[0] == 2 and RAGGED[-1] == 92681 and len(RAGGED) == 32


def test_bars_are_those_of_the_field() -> None:
    needed = {row.name: [bar.value for bar in row.needed] for row in ROWS}
    assert needed["decode-32x8192-capped"] == [142] and needed["decode-1x32768-capped"] == [29]
    assert needed["decode-32x8192-32-8-128"] == [262] and needed["decode-128x2048"] == [140]
    assert {bar.kind for bar in SUITE.cases["decode-16x131072-window"].needed} == {Kind.PEERS}  # type: ignore[attr-defined]
