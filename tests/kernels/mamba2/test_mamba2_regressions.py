"""Mistakes of other Mamba2 kernels, one test each. How wide an index may be needs a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernels.mamba2.test_mamba2 import check_against_reference
from rigs.kernels.batches import Row, plan_rows
from rigs.kernels.mamba_batches import MambaBatch, MambaLayer, make_mamba_batch
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows, mamba2

PLAIN = MambaLayer()
SHORT = MambaLayer(H=2, S=64, P=20, M=8)
MANY = 2**31


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("lengths", [(70, 0, 66), (0, 70, 3), (3, 0, 0, 5)], ids=str)
def test_an_empty_row_in_the_middle_changes_nothing(path: Path, lengths: tuple[int, ...]) -> None:
    """vLLM's state passing takes the chunk behind an empty sequence for the first of all."""
    whole = make_mamba_batch([Row(n) for n in lengths], path)
    before = whole.clone()
    y = whole.run(path)
    start = 0
    for i, n in enumerate(lengths):
        rows = [Row(m if i == j else 0, skipped=i != j) for j, m in enumerate(lengths)]
        alone = before.clone()
        tokens = slice(start, start + n)
        alone = replace(alone, rows=plan_rows(rows, PLAIN.M, path.device), xBC=alone.xBC[tokens], dt=alone.dt[tokens])
        assert_close(f"y of row {i}", y[tokens], alone.run(path), path.dtype)
        assert_close(f"state of row {i}", whole.state[2 * i + 1], alone.state[2 * i + 1], path.dtype)
        if n == 0:
            assert same_bits(whole.state[2 * i + 1], before.state[2 * i + 1])
        start += n


@pytest.mark.parametrize("length", [1, 3, 70])
def test_the_initial_state_of_a_batch_of_one_is_read(path: Path, length: int) -> None:
    """vLLM #22034: with one sequence the initial states were ignored."""
    batch = make_mamba_batch([Row(length)], path)
    fresh = replace(batch.clone(), rows=plan_rows([Row(length, fresh=True)], PLAIN.M, path.device))
    y = batch.run(path)
    assert not torch.allclose(y, fresh.run(path), atol=1e-2)
    again = make_mamba_batch([Row(length)], path)
    check_against_reference(again, path, path.dtype)


def test_decays_begin_with_the_row_and_not_with_its_chunk(path: Path) -> None:
    """vLLM #23279: sums of decays that began with the chunk leaked from one sequence into the next."""
    rows = [Row(37, fresh=True), Row(90, fresh=True), Row(2, fresh=True)]
    batch = make_mamba_batch(rows, path)
    changed = batch.clone()
    changed = replace(changed, dt=changed.dt.clone(), xBC=changed.xBC.clone())
    # Another first row of the same length.
    changed.dt[:37] += 3.0
    changed.xBC[:37] *= -2.0
    want, got = batch.run(path), changed.run(path)
    assert not torch.equal(got[:37], want[:37])
    if path.device != "cpu":
        assert torch.equal(got[37:], want[37:])
    assert_close("y", got[37:], want[37:], torch.float32)
    assert_close("state", changed.state[3:], batch.state[3:], torch.float32)


def test_padding_never_writes_the_last_line(path: Path) -> None:
    """SGLang #23353: the index -1 of a padded row wrote the pool's last line."""
    batch = make_mamba_batch([Row(1, skipped=True), Row(4, skipped=True), Row(9, skipped=True)], path)
    batch.state.fill_(2.0)
    before = batch.clone()
    y = batch.run(path)
    assert same_bits(batch.state, before.state) and same_bits(batch.drafts, before.drafts)
    assert torch.equal(y, torch.zeros_like(y))


def test_padding_of_a_graph_advances_no_state(path: Path) -> None:
    """A bucket's padding rows have a token each, which belongs to nobody."""
    batch = make_mamba_batch([Row(1), Row(1, skipped=True), Row(1, skipped=True)], path)
    alone = replace(batch.clone(), rows=plan_rows([Row(1)], PLAIN.M, path.device))
    alone = replace(alone, xBC=alone.xBC[:1], dt=alone.dt[:1])
    y = batch.run(path)
    assert torch.equal(y[:1], alone.run(path)) and not y[1:].any()
    assert same_bits(batch.state, alone.state)


def test_a_new_sequence_reads_nothing_of_its_line(path: Path) -> None:
    """Whoever depends on zeroed slots keeps the NaN of a former owner: a product with zero does not remove it."""
    for length in (1, 5, 66):
        batch = make_mamba_batch([Row(length, fresh=True)], path, SHORT)
        assert batch.state[1].isnan().all() and batch.drafts[1].isnan().all()
        y = batch.run(path)
        assert not y.isnan().any() and not batch.state[1].isnan().any()


@pytest.mark.parametrize("layer", [PLAIN, SHORT], ids=["token-by-token", "at-once"])
def test_no_drafts_after_an_accepted_step(path: Path, layer: MambaLayer) -> None:
    """vLLM #39273: a step without drafts, behind an accepted one, began with a stale state."""
    drafted = make_mamba_batch([Row(4, verify=True)], path, layer)
    serial = drafted.clone()
    drafted.run(path)
    got = drafted.run_part(path, 2, 3, Row(1, replayed=2, half=1))
    serial.run_part(path, 0, 2)
    want = serial.run_part(path, 2, 3)
    assert_close("y", got, want, path.dtype)
    assert_close("state", drafted.state, serial.state, path.dtype)


@pytest.mark.parametrize("layer", [PLAIN, SHORT], ids=["token-by-token", "at-once"])
def test_nothing_accepted_leaves_the_state(path: Path, layer: MambaLayer) -> None:
    """vLLM #50021: an accepted count of zero read the slot before the row's."""
    drafted = make_mamba_batch([Row(4, verify=True)], path, layer)
    plain = drafted.clone()
    drafted.run(path)
    got = drafted.run_part(path, 1, 4, Row(3, verify=True, replayed=0, half=1))
    want = plain.run_part(path, 1, 4, Row(3, verify=True, half=1))
    assert torch.equal(got, want) and same_bits(drafted.state, plain.state)


@pytest.mark.parametrize("drafts", [5, 8, 12])
def test_more_than_four_drafts(path: Path, drafts: int) -> None:
    """vLLM #37035: more than four speculative tokens left the buffers."""
    layer = replace(SHORT, M=drafts)
    batch = make_mamba_batch([Row(drafts, verify=True, replayed=drafts), Row(2, verify=True)], path, layer)
    check_against_reference(batch, path, path.dtype)


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


def test_steps_are_clamped_behind_their_softplus(path: Path) -> None:
    """Not before it, nor with the decay's rate: both record another update."""
    layer = replace(PLAIN, dt_limit=(0.25, 0.5))
    batch = make_mamba_batch([Row(3, verify=True, fresh=True)], path, layer)
    batch.dt.copy_(torch.tensor([[-9.0], [-1.0], [9.0]]))
    batch.dt_bias.zero_()
    batch.run(path)
    gates = batch.drafts[1, 1, :3, -PLAIN.H :]
    steps = gates / -batch.A_log.exp()
    want = torch.tensor([0.25, math.log1p(math.exp(-1.0)), 0.5], device=path.device)
    assert_close("steps", steps, want[:, None].expand(3, PLAIN.H), torch.float32)


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
