"""A projection is the product with its weight, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from deltaline_server.layers.projection import Projection


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 300])
def test_a_row_has_the_same_bits_alone_and_among_others(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, x = torch.randn(70, 130, generator=generator), torch.randn(num_rows, 130, generator=generator)
    project = Projection(weight)
    whole = project(x)
    assert torch.allclose(whole, x @ weight.T, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(project(x[i : i + 1])[0], whole[i]) for i in range(num_rows))
