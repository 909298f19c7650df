"""causal_conv1d against its reference, and what must hold between its own runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Batch, Layer, Row, make_batch, plan_rows
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import Rows, causal_conv1d, causal_conv1d_reference, run_selftest

CASES = {
    "one-token": [Row(1)],
    "shorter-than-the-history": [Row(1), Row(2), Row(3, to="other")],
    "decode": [Row(1) for _ in range(5)],
    "fresh": [Row(1, fresh=True), Row(4, fresh=True), Row(9, fresh=True)],
    "empty": [Row(0), Row(0, to="other"), Row(0, replayed=2), Row(0, fresh=True)],
    "verify-every-replayed-count": [Row(4, verify=True, replayed=r, half=r % 2) for r in range(5)],
    "verify-of-other-lengths": [Row(n, verify=True, to="other") for n in range(1, 5)],
    "63-64-65": [Row(63), Row(64), Row(65, replayed=3)],
    "mixed": [Row(1), Row(4, verify=True, replayed=1), Row(2, skipped=True), Row(0), Row(17, to="nowhere"), Row(5)],
    # Starts around the ends of the pieces of 64 tokens that a program owns.
    "starts-around-a-piece's-end": [Row(n) for n in (61, 1, 1, 1, 64, 62, 70, 59, 0, 1, 2, 63)],
    # In place: its last tokens must not be in the line before its first are done.
    "three-pieces": [Row(200)],
    "empty-at-a-piece's-end": [Row(64), Row(0, replayed=1), Row(64), Row(0, to="other"), Row(0, fresh=True)],
    "long-behind-a-short-head": [Row(62), Row(75, fresh=True), Row(53), Row(70, to="other", replayed=2)],
    "many": [Row(i % 3 % 2, skipped=i % 7 == 0, to="other" if i % 5 == 0 else "same") for i in range(131)],
    # More than an update takes, and more than are counted at once.
    "many-prefills": [Row(9 if i % 50 == 9 else i % 2, skipped=i % 7 == 0) for i in range(131)],
    "many-verifies": [Row(i % 25 % 5, verify=i % 3 > 0, replayed=i % 4, skipped=i % 11 == 0) for i in range(130)],
    "skipped-and-null": [Row(1, skipped=True), Row(3, to="null"), Row(9, skipped=True), Row(9, to="null")],
}


@pytest.mark.parametrize("case", CASES)
def test_conv_matches_the_reference(path: Path, case: str) -> None:
    check(path, make_batch(CASES[case], path))


def check(path: Path, batch: Batch) -> None:
    """Compare outputs within the tolerance and lines bit by bit; NaN where nothing is to be written."""
    want_lines = batch.lines.clone()
    want = causal_conv1d_reference(batch.qkv, batch.weight, batch.bias, want_lines, batch.rows)
    got = path.conv(batch.qkv, batch.weight, batch.bias, batch.lines, batch.rows)
    assert_close("y", got, want, path.dtype)
    assert torch.equal(batch.lines.nan_to_num(7.0), want_lines.nan_to_num(7.0))


@pytest.mark.parametrize("draft", [8, 12])
def test_conv_verifies_many_tokens(path: Path, draft: int) -> None:
    rows = [Row(n, verify=n != 6, replayed=n // 2) for n in (1, draft, 6, draft - 1, 5)] + [Row(70, replayed=draft)]
    check(path, make_batch(rows, path, Layer(M=draft)))


# 3 to 2,053 channels, no multiple of a block.
@pytest.mark.parametrize("key_dim", [1, 128, 513, 1026])
def test_conv_has_any_number_of_channels(path: Path, key_dim: int) -> None:
    rows = [Row(1), Row(3, verify=True, replayed=1), Row(67), Row(2, skipped=True), Row(9, fresh=True)]
    check(path, make_batch(rows, path, Layer(HV=1, K=key_dim, V=1)))


@pytest.mark.parametrize("sizes", [(48,), (16, 32), (16, 16, 16), (1, 46, 1), (48, 0, 0)], ids=str)
def test_conv_splits_its_output(path: Path, sizes: tuple[int, ...]) -> None:
    rows = [Row(1), Row(4, verify=True, replayed=2), Row(12), Row(3, skipped=True), Row(0, replayed=1)]
    batch = make_batch(rows, path)
    whole = batch.clone()
    want = path.conv(whole.qkv, whole.weight, whole.bias, whole.lines, whole.rows)
    parts = path.conv_split(batch.qkv, batch.weight, batch.bias, batch.lines, batch.rows, sizes)
    assert [part.shape[1] for part in parts] == list(sizes)
    assert all(part.is_contiguous() for part in parts)
    assert_close("parts", torch.cat(parts, dim=1), want, path.dtype)
    assert torch.equal(batch.lines.nan_to_num(7.0), whole.lines.nan_to_num(7.0))


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
    for sizes in ((), (47,), (49, -1), (12, 12, 12, 12)):
        with pytest.raises(ValueError, match=r"^split: expected 1 to 3 sizes that add up to 48 channels"):
            causal_conv1d(good.qkv, good.weight, good.bias, good.lines, good.rows, split=sizes)
    other_types: list[tuple[str, dict[str, Any]]] = [
        ("split: expected a sequence of integers", {"split": 4}),
        ("split: expected a sequence of integers", {"split": ["a"]}),
        ("rows: expected Rows, got NoneType", {"rows": None}),
    ]
    for message, told in other_types:
        with pytest.raises(TypeError, match=f"^{message}"):
            causal_conv1d(good.qkv, good.weight, good.bias, good.lines, **({"rows": good.rows} | told))


# Channels that fill no vector of the CPU, alone and as the shares of several threads.
@pytest.mark.parametrize("key_dim", [16, 1600])
@pytest.mark.parametrize("length", [1, 7, 33])
def test_conv_row_is_the_same_alone(path: Path, key_dim: int, length: int) -> None:
    layer = Layer(K=key_dim)
    batch = make_batch([Row(length)] * 7, path, layer)
    whole, lines = run(path, batch.clone())
    for i in range(7):
        begin, line = i * length, 2 * i + 1
        alone = batch.lines[line - 1 : line + 2].clone()
        rows = plan_rows([Row(length)], layer.M, path.device)
        y = path.conv(batch.qkv[begin : begin + length], batch.weight, batch.bias, alone, rows)
        assert torch.equal(y, whole[begin : begin + length])
        assert torch.equal(alone[1], lines[line])


@pytest.mark.gpu
def test_conv_updates_any_number_of_rows() -> None:
    """More programs of rows than the second axis of a grid takes."""
    num_rows, channels = 4 * 65_535 + 9, 8
    x = torch.randn(num_rows, channels, device="cuda")
    lines = torch.randn(num_rows + 1, 3, channels, device="cuda")
    weight = torch.randn(4, channels, device="cuda")
    owned, ones, zeros = list(range(1, num_rows + 1)), [1] * num_rows, [0] * num_rows
    rows = Rows.build(ones, owned, owned, ones, zeros, zeros, max_short=1, device="cuda")
    total = (torch.cat((lines[1:], x[:, None]), dim=1) * weight).sum(1)
    got = causal_conv1d(x, weight, None, lines, rows)
    assert_close("y", got, total * torch.sigmoid(total), torch.float32)
    assert torch.equal(lines[1:, 2], x)


@pytest.mark.gpu
def test_conv_compiles_nothing_while_serving() -> None:
    from deltaline_kernels.conv1d.prefill import prefill_kernel
    from deltaline_kernels.conv1d.update import update_kernel

    def variants() -> int:
        return sum(
            len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in (prefill_kernel, update_kernel)
        )

    path, layer = Path("cuda", torch.bfloat16), Layer(M=8)
    run_selftest("cuda", path.dtype, num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=8, max_draft=8)
    before = variants()
    assert before > 0
    weight = torch.ones(layer.W, layer.channels, dtype=path.dtype, device=path.device)
    for num_rows in (1, 2, 16, 127, 128, 129, 300):
        for length in (1, 2, 4, 7, 8):
            rows = [Row(length, verify=length > 1)] * num_rows
            for long in ([], [Row(9)], [Row(64), Row(130)]):
                batch = make_batch(rows + long, path, layer)
                # The columns of what a layer projects, as the self-test has them.
                wide = batch.qkv.new_zeros(batch.qkv.shape[0], layer.channels + layer.HV * (layer.V + 2))
                path.conv(wide[:, : layer.channels], weight, None, batch.lines, batch.rows)
    assert variants() == before
