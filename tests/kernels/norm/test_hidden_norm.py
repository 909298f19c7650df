"""rms_norm and add_rms_norm against their references."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

EPS = 1e-6
SHAPES = {
    "one-token": (1, 64),
    "one-channel": (5, 1),
    "odd": (7, 5),
    "65-tokens": (65, 200),
    "no-power-of-two": (3, 5120),
    "largest": (2, 8192),
    "empty": (0, 8),
    "no-channels": (3, 0),
}


def strided(path: Path, shape: tuple[int, int], seed: int) -> Tensor:
    """Rows of a wider tensor, as a slice of a projection's output has them."""
    wide = normal(shape[0], shape[1] + 3, seed=seed).to(path.device, path.dtype)
    return wide[:, : shape[1]]


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_matches_the_reference(path: Path, shape: str) -> None:
    x, weight = strided(path, SHAPES[shape], 1), normal(SHAPES[shape][1], seed=2).to(path.device)
    got = path.hidden_norm(x, weight, EPS)
    assert got.dtype == path.dtype and got.is_contiguous()
    assert_close("y", got, rms_norm_reference(x.double(), weight, EPS), path.dtype)


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_and_norm_match_the_reference(path: Path, shape: str, in_fp32: bool, scale: float) -> None:
    x, residual = (strided(path, SHAPES[shape], seed) for seed in (1, 3))
    residual = normal(*SHAPES[shape], seed=3).to(path.device) if in_fp32 else residual
    weight = normal(SHAPES[shape][1], seed=2).to(path.device)
    before = x.clone(), residual.clone()
    total, y = path.add_norm(x, residual, weight, EPS, scale)
    assert (total.dtype, y.dtype) == (residual.dtype, path.dtype) and total.is_contiguous() and y.is_contiguous()
    want = add_rms_norm_reference(x.double(), residual.double(), weight, EPS, scale=scale)
    assert_close("total", total, want[0], residual.dtype)
    assert_close("y", y, want[1], path.dtype)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
def test_the_sum_has_the_bits_of_torchs(path: Path, in_fp32: bool) -> None:
    """As that at the end of a span, which torch makes."""
    x, residual = normal(2, 20, 600).to(path.device, path.dtype)
    residual = residual.float() if in_fp32 else residual
    total, _ = path.add_norm(x, residual, torch.ones(600, device=path.device), EPS, 1.0)
    assert torch.equal(total, residual + x)


def test_a_scaled_sum_is_rounded_once(path: Path) -> None:
    """Neither is what is added rounded before, of which a tenth of the bits would differ, nor must it fit by itself."""
    x, residual = (normal(20, 600, seed=seed).to(path.device, path.narrow) for seed in (1, 3))
    weight = normal(600, seed=2).to(path.device)
    total, _ = path.add_norm(x, residual, weight, EPS, 0.22)
    assert torch.equal(total, add_rms_norm_reference(x.double(), residual.double(), weight, EPS, scale=0.22)[0].to(x))
    x, residual = (torch.full((1, 600), value, device=path.device).half() for value in (40000.0, -60000.0))
    total, _ = path.add_norm(x, residual, weight, EPS, 2.0)
    assert torch.equal(total, torch.full_like(total, 20000.0))


@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
def test_the_norm_is_that_of_the_rounded_sum(path: Path, in_fp32: bool) -> None:
    """As a model's, which adds and then normalises. Of the sum as it was before, a third of the bits would differ."""
    x, weight = normal(20, 600).to(path.device, path.dtype), normal(600, seed=2).to(path.device)
    residual = normal(20, 600, seed=3).to(path.device, torch.float32 if in_fp32 else path.dtype)
    total, y = path.add_norm(x, residual, weight, EPS, 0.22)
    rounded = total.to(path.dtype)
    assert torch.equal(path.hidden_norm(rounded, weight, EPS), y)
    exact = rms_norm_reference(rounded.double(), weight, EPS)
    # In fp32 what is compared is not rounded: there the test above says all.
    assert path.dtype == torch.float32 or float((exact.to(path.dtype) != y).double().mean()) < 0.01


def test_a_token_does_not_depend_on_its_neighbours(path: Path) -> None:
    """Nor on how many there are; and a repeat has the same bits."""
    x, residual = normal(2, 9, 5120).to(path.device, path.dtype)
    weight = normal(5120, seed=2).to(path.device)
    whole = path.add_norm(x, residual, weight, EPS, 1.0)
    again = path.add_norm(x, residual, weight, EPS, 1.0)
    others = x.clone()
    others[:4], others[5:] = torch.nan, torch.nan
    beside = path.add_norm(others, residual, weight, EPS, 1.0)
    alone = path.add_norm(x[4:5], residual[4:5], weight, EPS, 1.0)
    for part in range(2):
        assert torch.equal(again[part], whole[part])
        assert torch.equal(beside[part][4], whole[part][4]) and torch.equal(alone[part][0], whole[part][4])
    assert beside[1][:4].isnan().all()
    assert torch.equal(path.hidden_norm(x[4:5], weight, EPS)[0], path.hidden_norm(x, weight, EPS)[4])


def test_norm_of_zeros_is_zero(path: Path) -> None:
    zeros, ones = torch.zeros(3, 8, dtype=path.dtype, device=path.device), torch.ones(8, device=path.device)
    for made in (path.hidden_norm(zeros, ones, EPS), *path.add_norm(zeros, zeros, ones, EPS, 1.0)):
        assert torch.equal(made, zeros)


def test_norms_name_the_wrong_argument() -> None:
    x, weight = torch.zeros(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"^x: expected packed rows"):
        rms_norm(torch.zeros(8, 3).t(), weight, EPS)
    with pytest.raises(ValueError, match=r"^x: expected shape \[\*, \*\], got \[1, 3, 8\]"):
        rms_norm(x[None], weight, EPS)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[8\], got \[7\]"):
        rms_norm(x, weight[:7], EPS)
    with pytest.raises(TypeError, match=r"^weight: expected torch.float32, got torch.bfloat16"):
        add_rms_norm(x, x, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"^eps: expected at least 0, got -1"):
        add_rms_norm(x, x, weight, -1)
    with pytest.raises(ValueError, match=r"^residual: expected shape \[3, 8\], got \[2, 8\]"):
        add_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(TypeError, match=r"^residual: expected torch.bfloat16 or torch.float32, got torch.float16"):
        add_rms_norm(x.bfloat16(), x.half(), weight, EPS)
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, got inf"):
        add_rms_norm(x, x, weight, EPS, scale=torch.inf)
