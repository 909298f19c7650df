"""gated_rms_norm against its reference."""

from __future__ import annotations

import pytest
import torch
from kernels.paths import Path
from kernels.tolerance import assert_close

from deltaline_kernels import gated_rms_norm, gated_rms_norm_reference

SHAPES = {"one-token": (1, 2, 16), "odd": (7, 3, 5), "65-tokens": (65, 2, 64), "empty": (0, 2, 8)}


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_matches_the_reference(path: Path, shape: str) -> None:
    num_tokens, heads, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    o = torch.randn(num_tokens, heads, dim, generator=generator).to(path.device, path.dtype)
    projected = torch.randn(num_tokens, heads * dim + 5, generator=generator).to(path.device, path.dtype)
    z = projected[:, : heads * dim].unflatten(1, (heads, dim))
    weight = torch.randn(dim, generator=generator).to(path.device)
    got = path.norm(o, z, weight, 1e-6)
    assert got.dtype == path.dtype
    assert_close("y", got, gated_rms_norm_reference(o, z, weight, 1e-6), path.dtype)


def test_norm_of_zeros_is_zero(path: Path) -> None:
    o = torch.zeros(3, 2, 8, dtype=path.dtype, device=path.device)
    assert torch.equal(path.norm(o, torch.ones_like(o), torch.ones(8, device=path.device), 1e-6), o.flatten(1))


def test_norm_names_the_wrong_argument() -> None:
    o = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"^z: expected shape"):
        gated_rms_norm(o, o[:, :1], torch.ones(8), 1e-6)
    with pytest.raises(TypeError, match=r"^weight: expected"):
        gated_rms_norm(o, o, torch.ones(8, dtype=torch.float16), 1e-6)
