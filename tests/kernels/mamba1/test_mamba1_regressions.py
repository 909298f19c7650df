"""Mamba-1 at lines and tokens beyond what 32 bits count, and rows that change while a graph is replayed. On a GPU."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import check_far_lines, same_bits
from rigs.kernels.scan_batches import ScanLayer, make_scan_batch

from deltaline_kernels import Rows, mamba1

MANY = 2**31
KINDS = [Row(1), Row(5, verify=True, replayed=3), Row(70)]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.mark.gpu
@DTYPES
def test_offsets_of_lines_beyond_int32(dtype: torch.dtype) -> None:
    path = Path("cuda", dtype)
    batch = make_scan_batch(KINDS, path, ScanLayer(D=4096, M=5), state_dtype=torch.bfloat16)
    check_far_lines(batch, path, lambda _: None)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@DTYPES
def test_offsets_of_tokens_beyond_int32(dtype: torch.dtype) -> None:
    path, layer = Path("cuda", dtype), ScanLayer(D=256, M=5)
    near = make_scan_batch(KINDS, path, layer, padding=0)
    begin = MANY // layer.D + 7
    packed = {}
    for name in near.PACKED:
        few = getattr(near, name)
        packed[name] = torch.empty((begin + len(few), few.shape[1]), dtype=dtype, device="cuda")
        packed[name][begin:] = few
    control = near.rows.control.clone()
    control[0] += begin
    rows = Rows(control, near.rows.num_short, near.rows.max_short, near.rows.max_length)
    far = near.clone().replaced(rows=rows, **packed)
    y = mamba1(*far.inputs, far.state, far.drafts, far.rows)
    assert y.numel() > MANY and torch.equal(y[begin:], near.run(path))
    assert same_bits(far.state, near.state) and same_bits(far.drafts, near.drafts)
    del far, packed, y
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_graph_follows_the_rows() -> None:
    """Captured with some lines, replayed with others and another length; the host waits for nothing."""
    path = Path("cuda", torch.bfloat16)
    batch = make_scan_batch(KINDS, path, ScanLayer(D=64, M=5))
    other = plan_rows([Row(1, to="other"), Row(5, verify=True, replayed=1), Row(70, fresh=True)], 5, "cuda")
    with no_waits():
        batch.run(path)

    def change() -> None:
        batch.rows.control.copy_(other.control)

    check_replay(lambda: [batch.run(path)], [batch.state, batch.drafts], change)
