"""rms_norm and add_rms_norm against their references."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

SHAPES = {
    "one": (1, 1),
    "one-token": (1, 48),
    "odd": (7, 5),
    "65-tokens": (65, 200),
    "empty": (0, 8),
    "long": (3, 9001),
}


def draw(path: Path, num_tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Rows that do not lie side by side."""
    wide = normal(num_tokens, channels + 3, seed=seed)
    return wide.to(path.device, path.dtype)[:, :channels]


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_match_the_reference(path: Path, shape: str) -> None:
    x, weight = draw(path, *SHAPES[shape]), normal(SHAPES[shape][1], seed=1).to(path.device)
    got = path.rms_norm(x, weight, 1e-6)
    assert got.dtype == path.dtype
    assert_close("y", got, rms_norm_reference(x.double(), weight, 1e-6), path.dtype)


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("wide", [False, True], ids=["residual-as-x", "residual-fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_their_norms_match_the_reference(path: Path, shape: str, wide: bool, scale: float) -> None:
    x, residual = draw(path, *SHAPES[shape]), draw(path, *SHAPES[shape], seed=1)
    residual = residual.float() if wide else residual
    weight = normal(SHAPES[shape][1], seed=2).to(path.device)
    added, y = path.add_rms_norm(x, residual, weight, 1e-6, scale)
    assert (added.dtype, y.dtype) == (residual.dtype, path.dtype)
    want, _ = add_rms_norm_reference(x.double(), residual.double(), weight, 1e-6, scale=scale)
    assert_close("added", added, want, added.dtype)
    # What is normed is the sum as it is kept, rounded to what x is.
    assert_close("y", y, rms_norm_reference(added.to(path.dtype).double(), weight, 1e-6), path.dtype)


def test_a_sum_has_the_bits_of_torchs(path: Path) -> None:
    """So that a layer that keeps its sum is not told from one that had it made by two operations."""
    x, residual = draw(path, 33, 200), draw(path, 33, 200, seed=1)
    added, y = path.add_rms_norm(x, residual, torch.ones(200, device=path.device), 1e-6, 1.0)
    assert same_bits(added, residual.add(x))
    assert same_bits(y, path.rms_norm(added, torch.ones(200, device=path.device), 1e-6))


def test_a_row_is_normed_alone(path: Path) -> None:
    x, residual, weight = draw(path, 9, 300), draw(path, 9, 300, seed=1), normal(300, seed=2).to(path.device)
    added, y = path.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    for row in (0, 8):
        own = slice(row, row + 1)
        for got, want in zip(path.add_rms_norm(x[own], residual[own], weight, 1e-6, 1.0), (added, y), strict=True):
            assert same_bits(got, want[own])
    x[4] = torch.nan
    spoilt, _ = path.add_rms_norm(x, residual, weight, 1e-6, 1.0)
    assert spoilt[4].isnan().all() and same_bits(spoilt[5:], added[5:])


def test_norms_name_the_wrong_argument() -> None:
    x, weight = torch.zeros(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[8\]"):
        rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(TypeError, match=r"^weight: expected"):
        rms_norm(x.half(), weight.half(), 1e-6)
    with pytest.raises(ValueError, match=r"^x: expected at least 1 channel"):
        rms_norm(x[:, :0].contiguous(), weight[:0], 1e-6)
    with pytest.raises(ValueError, match=r"^residual: expected shape \[3, 8\]"):
        add_rms_norm(x, x[:2], weight, 1e-6)
    with pytest.raises(TypeError, match=r"^residual: expected"):
        add_rms_norm(x, x.half(), weight, 1e-6)
    with pytest.raises(ValueError, match=r"^eps: expected at least 0"):
        add_rms_norm(x, x, weight, -1.0)
    with pytest.raises(ValueError, match=r"^scale: expected a finite number"):
        add_rms_norm(x, x, weight, 1e-6, scale=float("inf"))
