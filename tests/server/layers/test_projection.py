"""A projection is the product with its weight, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from deltaline_kernels import multiply_fp8_reference, pack_fp8
from deltaline_server.checkpoints.fp8.held import Fp8Weight
from deltaline_server.layers.projection import Projection


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 300])
def test_a_row_has_the_same_bits_alone_and_among_others(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = torch.randn(70, 130, generator=generator), torch.randn(num_rows, 130, generator=generator)
    project = Projection([weight])
    whole = project(x)
    assert torch.allclose(whole, x @ weight.T, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(project(x[i : i + 1])[0], whole[i]) for i in range(num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 40])
def test_pieces_lie_one_after_the_other(num_rows: int, dtype: torch.dtype) -> None:
    """And a row's bits are its own, of pieces in FP8 and of others."""
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = torch.randn(70, 130, generator=generator), torch.randn(num_rows, 130, generator=generator).to(dtype)
    values = torch.randn(200, 130, generator=generator).to(torch.float8_e4m3fn)
    fp8, plain = Fp8Weight(pack_fp8(values), torch.rand(2, 2, generator=generator) + 0.5), weight.to(dtype)
    project = Projection([fp8, plain, fp8], bias=torch.ones(470, dtype=dtype))
    in_fp8, whole = multiply_fp8_reference(x, values, fp8.scales), project(x)
    expected = torch.cat((in_fp8, x @ plain.T, in_fp8), dim=1) + 1
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (1e-2, 0.1)
    assert torch.allclose(whole, expected, rtol=rtol, atol=atol)
    if dtype is torch.float32:
        assert all(torch.equal(project(x[i : i + 1])[0], whole[i]) for i in range(num_rows))
