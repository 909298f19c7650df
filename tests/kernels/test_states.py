"""Where the states of the recurrences may lie, and of which dtype they may be: lines apart, and one for each token."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.batches import Layer, Recurrent, Row, make_batch, plan_rows
from rigs.kernels.compiled import compile_launches
from rigs.kernels.kda_batches import KdaLayer, make_kda_batch
from rigs.kernels.mamba_batches import MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import check_against_reference, check_written_elsewhere, place_lines, same_bits
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows, causal_conv1d
from deltaline_kernels.rows import StateLines

MAKERS: dict[str, Any] = {
    "delta": (make_batch, Layer, "K", "V"),
    "kda": (make_kda_batch, KdaLayer, "K", "V"),
    "mamba1": (make_scan_batch, ScanLayer, "S", "D"),
    "mamba2": (make_mamba_batch, MambaLayer, "S", "P"),
}
# What is compiled for short rows and for long ones.
KERNELS = {
    "delta": {"_verify", "walk_kernel"},
    "kda": {"_prepare", "_verify_keyed", "pair_kernel", "_invert", "walk_kernel"},
    "mamba1": {"_scan"},
}
ROWS = [
    Row(1),
    Row(4, verify=True, replayed=2, half=1),
    Row(3, to="other"),
    Row(0, replayed=2, to="other"),
    Row(2, fresh=True),
    Row(2, skipped=True),
    Row(70, replayed=1),
    Row(9, to="nowhere"),
]
# Rows of a few tokens each, whose lines they are; behind them the lines that they read and write.
KEPT_ROWS = [Row(3), Row(2), Row(1, fresh=True), Row(0), Row(2, skipped=True), Row(4)]
READ, WRITE = [1, 3, 0, 7, -1, 11], [-1, 4, 5, 8, -1, -1]
# To the line that was read, to none, twice to the same one.
TOKEN_LINES = [[2, 13, 1], [3, -1], [6], [], [-1, -1], [12, 12, 9, 0]]
WRITTEN = {1, 2, 3, 4, 5, 6, 8, 9, 12, 13}

KINDS = pytest.mark.parametrize("kind", MAKERS)
STATES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def make(kind: str, rows: list[Row], path: Path, dtype: torch.dtype, size: int = 0) -> Any:
    """Make a batch of heads of that size, or of odd sizes."""
    build, layer, keys, values = MAKERS[kind]
    return build(rows, path, layer(**({keys: size, values: size} if size else {})), state_dtype=dtype)


def keep_states(batch: Recurrent, path: Path) -> Any:
    """Return the batch with a line for the state after each token of KEPT_ROWS."""
    lengths = [row.length for row in KEPT_ROWS]
    idle = [0] * len(lengths)
    told: dict[str, Any] = {"token_lines": TOKEN_LINES, "max_short": 4, "device": path.device}
    return batch.replaced(rows=Rows.build(lengths, READ, WRITE, lengths, [0, 2, *idle[2:]], idle, **told))


@KINDS
@pytest.mark.parametrize(("gap", "size"), [(64, 64), (4, 0)], ids=["of-whole-vectors", "of-a-few-bytes"])
def test_lines_may_lie_apart(path: Path, kind: str, gap: int, size: int) -> None:
    """Read and written where they are; what lies between them stays as it is."""
    packed: Any = make(kind, ROWS, path, torch.float16 if gap == 64 else torch.float32, size)
    apart, between = place_lines(packed, gap)
    assert apart.state.stride(0) > apart.state[0].numel() and not apart.drafts.is_contiguous()
    want, got = packed.run(path), apart.run(path)
    assert_close("o", got, want, torch.float32 if path.dtype == torch.float32 else path.dtype)
    assert_close("state", apart.state, packed.state, path.dtype if size else torch.float32)
    assert_close("drafts", apart.drafts, packed.drafts, path.dtype)
    assert all(bool((gaps == 255).all()) for gaps in between)


def test_lines_of_a_convolution_may_lie_apart(path: Path) -> None:
    batch = make_batch([row for row in ROWS if row.length <= 4 or not row.replayed], path)
    room = torch.full((len(batch.lines), batch.lines[0].numel() + 3), 7.0, dtype=path.dtype, device=path.device)
    apart = room[:, :-3].unflatten(1, batch.lines.shape[1:])
    apart.copy_(batch.lines)
    got, want = (
        causal_conv1d(batch.qkv, batch.weight, batch.bias, lines, batch.rows) for lines in (apart, batch.lines)
    )
    assert_close("y", got, want, path.dtype)
    assert same_bits(apart, batch.lines) and bool((room[:, -3:] == 7).all())


@KINDS
@STATES
def test_a_state_of_any_dtype_is_rounded_once(path: Path, kind: str, dtype: torch.dtype) -> None:
    limit = path.dtype if dtype == torch.float32 else dtype
    check_against_reference(make(kind, ROWS, path, dtype), path, max(limit, path.dtype, key=_coarseness))


@KINDS
def test_states_are_written_elsewhere(half_path: Path, kind: str) -> None:
    """Through the launchers, which take another tensor than that which is read."""
    check_written_elsewhere(make(kind, ROWS, half_path, torch.float32, 64))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@KINDS
def test_kernels_compile_for_states_of_two_dtypes_that_lie_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a Hopper GPU: verify and the walk through chunks, which the interpreter does not compile."""
    pytest.importorskip("triton")
    packed = make(kind, [Row(1), Row(70)], Path("cpu", torch.bfloat16), torch.float16, 128)
    given = ((field.name, getattr(packed, field.name)) for field in fields(packed))
    batch = packed.replaced(**{name: x.to("meta") for name, x in given if isinstance(x, Tensor)})
    size = packed.state.shape[1:]
    state = torch.empty(6, size.numel() + 1, dtype=torch.float16, device="meta")[:, :-1].unflatten(1, size)
    o = torch.empty(71, *size[:-1], dtype=torch.bfloat16, device="meta")
    rows = plan_rows([Row(1), Row(70)], 4, "cpu")
    rows = replace(rows, control=rows.control.to("meta"))
    lines = StateLines(state, batch.drafts, written=torch.empty(6, *size, device="meta"))
    compiled = compile_launches(monkeypatch, partial(batch.launch, lines, rows, o))
    assert KERNELS.get(kind, KERNELS["delta"]) <= {kernel.metadata.name for kernel in compiled}


@KINDS
@STATES
def test_every_token_may_leave_its_state(path: Path, kind: str, dtype: torch.dtype) -> None:
    """What goes on is not what was rounded: outputs are those of an fp32 state that begins alike."""
    kept = keep_states(make(kind, KEPT_ROWS, path, dtype), path)
    before = kept.state.clone()
    exact = kept.replaced(state=before.to(torch.float32, copy=True), drafts=kept.drafts.clone())
    want, got = exact.run_reference(), kept.run(path)
    assert_close("o", got, want, path.dtype)
    assert_close("state", kept.state, exact.state.to(dtype), max(dtype, path.dtype, key=_coarseness))
    others = [line for line in range(len(before)) if line not in WRITTEN]
    assert same_bits(kept.state[others], before[others])


@KINDS
def test_a_state_for_each_token_leaves_outputs_as_they_are(exact_path: Path, kind: str) -> None:
    """To about 1e-7, of eight tokens and a state of 16 bits."""
    build, layer, *_ = MAKERS[kind]
    batch: Any = build([Row(8), *[Row(0)] * 3], exact_path, layer(M=8), state_dtype=torch.bfloat16)
    told: dict[str, Any] = {"max_short": 8, "device": exact_path.device}
    idle, fields = [0], ([8], [1], [-1], [8])
    plain = batch.replaced(rows=Rows.build(*fields, idle, idle, **told))
    kept = batch.replaced(rows=Rows.build(*fields, idle, idle, token_lines=[[*range(2, 9), 1]], **told))
    want, got = (part.run(exact_path).double() for part in (plain, kept))
    assert float((got - want).norm() / want.norm()) < 3e-7


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def test_token_lines_are_refused_where_they_say_nothing() -> None:
    good: dict[str, Any] = {
        "lengths": [2, 1],
        "read_line": [1, 0],
        "write_line": [-1, 3],
        "num_committed": [2, 1],
        "num_replayed": [0, 0],
        "draft_half": [0, 0],
        "token_lines": [[2, 1], [4]],
        "max_short": 2,
        "device": "cpu",
    }
    rows = Rows.build(**good)
    assert rows.token_lines.tolist() == [[2, 4], [1, -1]] and rows.short().token_lines.tolist() == [[2, 4], [1, -1]]
    assert rows.long().num_rows == 0
    for change, message in (
        ({"token_lines": [[2, 1]]}, "token_lines: expected 2 rows, got 1"),
        ({"token_lines": [[2, 1], []]}, r"token_lines\[1\]: expected 1 lines, got 0"),
        ({"token_lines": [[2, 3], [4]]}, "write_line: expected distinct lines"),
        ({"token_lines": [[2, -2], [4]]}, r"write_line\[0\]: expected a line or -1, got -2"),
        ({"read_line": [-1, 0]}, r"read_line\[0\]: expected a line"),
        ({"num_committed": [0, 1]}, r"num_committed\[0\]: expected 2 beside token_lines, got 0"),
        ({"max_short": 1}, r"lengths\[0\]: expected at most 1 beside token_lines, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Rows.build(**(good | change))
    for num_short, longest, message in (
        (1, 2, "num_short: expected 2"),
        (2, 3, "num_token_lines: expected at least 3"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Rows(torch.zeros(9, 3, dtype=torch.int32), num_short, 3, longest, 2)
