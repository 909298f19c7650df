"""Mistakes of other Mamba2 kernels, one test each. How wide an index may be needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.mamba_batches import MambaBatch, MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import Rows, mamba2

PLAIN = MambaLayer()
MANY = 2**31


def test_a_decode_is_a_verify_of_one_token(path: Path) -> None:
    """Two code paths for them drift apart."""
    decoded = make_mamba_batch([Row(1), Row(1)], path)
    verified = replace(decoded.clone(), rows=plan_rows([Row(1, verify=True), Row(1, verify=True)], 4, path.device))
    want = verified.run(path)
    assert_close("y", decoded.run(path), want, path.dtype)
    folds = plan_rows([Row(0, replayed=1, half=1)] * 2, 4, path.device)
    replace(verified, rows=folds, xBC=verified.xBC[:0], dt=verified.dt[:0]).run(path)
    if path.device != "cpu":
        assert same_bits(verified.state, decoded.state)
    assert_close("state", verified.state, decoded.state, torch.float32)


def test_small_steps_are_exact() -> None:
    """log(1 + exp(x)) is 0 for x below -17, where softplus is exp(x)."""
    check_small_steps(Path("cpu", torch.float32))


@pytest.mark.gpu
def test_small_steps_are_exact_on_a_gpu() -> None:
    check_small_steps(Path("cuda", torch.float32))


def check_small_steps(path: Path) -> None:
    """Compare the updates themselves: beside anything else they would not be seen."""
    batch = make_mamba_batch([Row(4, verify=True, fresh=True)], path)
    batch.dt.copy_(torch.tensor([[-12.0], [-18.0], [-25.0], [-40.0]]))
    batch.dt_bias.zero_()
    batch.run(path)
    record = batch.drafts[1, 1]
    x = batch.xBC[:, : PLAIN.H * PLAIN.P].double()
    want = x * batch.dt[:, :1].double().exp().log1p()
    got = record[:, PLAIN.G * PLAIN.S : PLAIN.G * PLAIN.S + PLAIN.H * PLAIN.P].double()
    assert float(((got - want) / want).abs().amax()) < 1e-5


def far_batch(dtype: torch.dtype, state: torch.dtype, begin: int = 0) -> tuple[MambaBatch, MambaBatch]:
    """Make rows of every kind in lines and at tokens beyond 2**31 values, and the same ones near 0."""
    layer = MambaLayer(H=8, G=2, S=64, P=32, M=8)
    path = Path("cuda", dtype)
    kinds = [Row(1), Row(5, verify=True, replayed=3), Row(70)]
    near = make_mamba_batch(kinds, path, layer, state_dtype=state, padding=0)
    # The first line whose drafts and whose states are there.
    first = 0 if begin else MANY // (layer.H * layer.P * layer.S) + MANY // (2 * layer.M * layer.record) + 3
    num_lines, num_tokens = near.state.shape[0], near.xBC.shape[0]
    lined = []
    for few in (near.state, near.drafts):
        many = torch.empty((first + num_lines, *few.shape[1:]), dtype=few.dtype, device="cuda")
        many[:10].fill_(torch.nan)
        many[first:] = few
        lined.append(many)
    packed = []
    for few in (near.xBC, near.dt):
        many = torch.empty((begin + num_tokens, *few.shape[1:]), dtype=few.dtype, device="cuda")
        many[begin:] = few
        packed.append(many)
    control = near.rows.control.clone()
    control[0] += begin
    control[1:3, :-1] += first
    rows = Rows(control, near.rows.num_short, near.rows.max_short, near.rows.max_length)
    return near, replace(near, rows=rows, xBC=packed[0], dt=packed[1], state=lined[0], drafts=lined[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_offsets_of_lines_beyond_int32(dtype: torch.dtype) -> None:
    """vLLM #41617: products of a line and its stride wrapped around; about 28 GB."""
    near, far = far_batch(dtype, torch.bfloat16)
    assert min(far.state.numel(), far.drafts.numel()) > MANY
    path, count = Path("cuda", dtype), near.state.shape[0]
    assert torch.equal(far.run(path), near.run(path))
    assert same_bits(far.state[-count:], near.state) and same_bits(far.drafts[-count:], near.drafts)
    assert far.state[:10].isnan().all() and far.drafts[:10].isnan().all()
    del far
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_offsets_of_tokens_beyond_int32(dtype: torch.dtype) -> None:
    """vLLM #40905: packs of more than 2**31 values wrapped around; about 35 GB."""
    begin = MANY // 256 + 7
    near, far = far_batch(dtype, torch.float32, begin)
    assert far.xBC.numel() > MANY
    path = Path("cuda", dtype)
    far_y = mamba2(*far.inputs, far.state, far.drafts, far.rows, num_groups=2)
    assert torch.equal(far_y[begin:], near.run(path)) and far_y.numel() > MANY
    assert same_bits(far.state, near.state) and same_bits(far.drafts, near.drafts)
    del far, far_y
    torch.cuda.empty_cache()
