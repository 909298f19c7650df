"""causal_conv1d against its reference, and what must hold between its own runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.batches import Batch, Layer, Row, make_batch, plan_rows
from kernels.paths import Path
from kernels.tolerance import assert_close

from deltaline_kernels import causal_conv1d, causal_conv1d_reference

CASES = {
    "one-token": [Row(1)],
    "shorter-than-the-history": [Row(1), Row(2), Row(3, to="other")],
    "decode": [Row(1) for _ in range(5)],
    "fresh": [Row(1, fresh=True), Row(4, fresh=True), Row(9, fresh=True)],
    "empty": [Row(0), Row(0, to="other"), Row(0, replayed=2), Row(0, fresh=True)],
    "verify-every-replayed-count": [Row(4, verify=True, replayed=r, half=r % 2) for r in range(5)],
    "verify-of-other-lengths": [Row(n, verify=True, to="other") for n in range(1, 5)],
    "63-64-65-and-a-prime": [Row(63), Row(64), Row(65, replayed=3), Row(127)],
    "mixed": [Row(1), Row(4, verify=True, replayed=1), Row(2, skipped=True), Row(0), Row(17, to="nowhere"), Row(5)],
    "skipped-and-null": [Row(1, skipped=True), Row(3, to="null"), Row(9, skipped=True), Row(9, to="null")],
}


@pytest.mark.parametrize("case", CASES)
def test_conv_matches_the_reference(path: Path, case: str) -> None:
    batch = make_batch(CASES[case], path)
    want_lines = batch.lines.clone()
    want = causal_conv1d_reference(batch.qkv, batch.weight, batch.bias, want_lines, batch.rows)
    got = path.conv(batch.qkv, batch.weight, batch.bias, batch.lines, batch.rows)
    assert_close("y", got, want, path.dtype)
    assert torch.equal(batch.lines.nan_to_num(7.0), want_lines.nan_to_num(7.0))


@pytest.mark.parametrize("width", [2, 3, 5, 6])
@pytest.mark.parametrize("activation", ["silu", None])
def test_conv_has_every_width(path: Path, width: int, activation: str | None) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=2), Row(40)]
    batch = make_batch(rows, path, Layer(K=9, V=7, W=width))
    want_lines = batch.lines.clone()
    want = causal_conv1d_reference(batch.qkv, batch.weight, None, want_lines, batch.rows, activation=activation)
    got = path.conv(batch.qkv, batch.weight, None, batch.lines, batch.rows, activation)
    assert_close("y", got, want, path.dtype)
    assert_close("lines", batch.lines, want_lines, path.dtype)


def test_conv_splits_without_a_seam(exact_path: Path) -> None:
    whole = make_batch([Row(50)], exact_path)
    split = whole.clone()
    want = exact_path.conv(whole.qkv, whole.weight, whole.bias, whole.lines, whole.rows)
    got, begin = [], 0
    for length in (1, 2, 40, 7):
        rows = plan_rows([Row(length)], whole.layer.M, exact_path.device)
        part = split.qkv[begin : begin + length]
        got.append(exact_path.conv(part, split.weight, split.bias, split.lines, rows))
        begin += length
    assert_close("y", torch.cat(got), want, torch.float32)
    history = whole.layer.W - 1
    assert torch.equal(split.lines[1, :history], whole.lines[1, :history])


def test_conv_replays_any_accepted_count(exact_path: Path) -> None:
    for accepted in range(5):
        drafted = make_batch([Row(4, verify=True)], exact_path)
        serial = drafted.clone()
        exact_path.conv(drafted.qkv, drafted.weight, drafted.bias, drafted.lines, drafted.rows)
        token = torch.ones_like(drafted.qkv[:1])
        after = plan_rows([Row(1, replayed=accepted, half=1)], 4, exact_path.device)
        got = exact_path.conv(token, drafted.weight, drafted.bias, drafted.lines, after)
        one = plan_rows([Row(1)], 4, exact_path.device)
        for t in range(accepted):
            exact_path.conv(serial.qkv[t : t + 1], serial.weight, serial.bias, serial.lines, one)
        want = exact_path.conv(token, serial.weight, serial.bias, serial.lines, one)
        assert_close(f"accepted {accepted}", got, want, torch.float32)


def test_conv_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    rows = [Row(1), Row(4, verify=True, replayed=2), Row(2, to="other"), Row(40)]
    batch = make_batch(rows, path)
    whole = run(path, batch.clone())
    assert torch.equal(run(path, batch.clone())[0], whole[0])
    start = 0
    for i, row in enumerate(rows):
        alone = batch.clone()
        others = [row if i == j else replace(other, skipped=True) for j, other in enumerate(rows)]
        alone = replace(alone, rows=plan_rows(others, batch.layer.M, path.device))
        alone.qkv[:start], alone.qkv[start + row.length :] = torch.nan, torch.nan
        y, lines = run(path, alone)
        assert torch.equal(y[start : start + row.length], whole[0][start : start + row.length])
        assert torch.equal(lines[2 * i + 1].nan_to_num(7.0), whole[1][2 * i + 1].nan_to_num(7.0))
        batch = make_batch(rows, path)
        start += row.length


def run(path: Path, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return path.conv(batch.qkv, batch.weight, batch.bias, batch.lines, batch.rows), batch.lines


def test_conv_names_the_wrong_argument() -> None:
    good = make_batch([Row(2)], Path("cpu", torch.float32))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "weight", {"weight": good.weight[:, 1:].contiguous()}),
        (ValueError, "weight", {"weight": good.weight[:1].contiguous()}),
        (TypeError, "lines", {"lines": good.lines.half()}),
        (ValueError, "lines", {"lines": good.lines[:, :2].contiguous()}),
        (ValueError, "x", {"qkv": good.qkv.t().contiguous().t()}),
        (TypeError, "x", {"qkv": good.qkv.double()}),
        (ValueError, "bias", {"bias": good.bias[1:]}),
    ]
    for error, name, change in wrong:
        bad = replace(good, **change)
        with pytest.raises(error, match=f"^{name}: expected"):
            causal_conv1d(bad.qkv, bad.weight, bad.bias, bad.lines, bad.rows)
    with pytest.raises(ValueError, match=r"^activation: expected"):
        causal_conv1d(good.qkv, good.weight, good.bias, good.lines, good.rows, activation="relu")
