"""SiLU as the kernels compute it: right in the tails too, which one hardware tanh is not."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import Rows

# Mantissa bits, and the exponent of the smallest normal number.
FORMATS = {torch.float32: (23, -126), torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def test_silu_is_right_to_the_last_place(path: Path) -> None:
    if path.device == "cpu" and path.dtype == torch.float32 and type(path) is Path:
        pytest.skip("in fp32 on the CPU it is PyTorch's")
    check_silu(path)


def check_silu(path: Path) -> None:
    """Compare silu with fp64 for sums in [-12, 12]: at most one unit in the last place of the output."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat(
        (
            torch.linspace(-12, 12, 60_001),
            torch.randn(20_000, generator=generator).exp() * torch.randn(20_000, generator=generator).sign(),
        )
    )
    values = values[values.abs() <= 11.9].to(path.dtype)
    num_channels = 64
    x = values[: values.numel() // num_channels * num_channels].view(-1, num_channels).to(path.device)
    # The products of the last tap are exact in fp32 and need more places than a 16-bit x has.
    scale = 1 + torch.arange(num_channels) / 8192
    if path.dtype == torch.float32:
        scale = torch.ones(num_channels)
    weight = torch.stack((torch.zeros(num_channels), scale)).to(path.device)
    length = x.shape[0]
    rows = Rows.build([length], [0], [-1], [length], [0], [0], max_short=1, device=path.device)
    lines = torch.zeros(1, 1, num_channels, dtype=path.dtype, device=path.device)
    got = path.conv(x, weight, None, lines, rows).double().cpu()
    total = x.double().cpu() * scale.double()
    want = total * torch.sigmoid(total)
    assert total.abs().max() > 11.5
    assert (got - want).abs().div(last_place(want, path.dtype)).max() <= 1


def last_place(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours of `dtype` at `value`."""
    mantissa, smallest = FORMATS[dtype]
    exponent = torch.frexp(value).exponent - 1
    return torch.ldexp(torch.ones_like(value), exponent.clamp(min=smallest) - mantissa)


def test_silu_is_right_far_from_zero(path: Path) -> None:
    check_far_silu(path)


def check_far_silu(path: Path) -> None:
    """Compare silu with fp64 where exp overflows or vanishes: tiny below, x above, never another's infinity."""
    values = [-80.0, -86.9, -88.0, -95.0, -110.0, -1e3, -1e30, -1e38, -3e38, 50.0, 1e3, 1e38, torch.inf]
    largest = torch.finfo(path.dtype).max
    x = torch.tensor(values).clamp(min=-largest).to(path.dtype)[:, None].expand(-1, 40).contiguous()
    zeros, ones = [0] * len(values), [1] * len(values)
    rows = Rows.build(ones, zeros, [-1] * len(values), ones, zeros, zeros, max_short=1, device=path.device)
    weight = torch.tensor([[0.0], [1.0]]).expand(2, 40).contiguous().to(path.device)
    lines = torch.zeros(1, 1, 40, dtype=path.dtype, device=path.device)
    got = path.conv(x.to(path.device), weight, None, lines, rows).double().cpu()
    want = (x.double() * torch.sigmoid(x.double())).to(path.dtype).double()
    # fp32: 5e-6 of the result, or 2e-36, below which it may be 0.
    relative = 5e-6 if path.dtype == torch.float32 else torch.finfo(path.dtype).eps
    near = (got - want).abs() <= relative * want.abs() + 2e-36 + torch.finfo(path.dtype).smallest_normal
    assert (near | (got == want)).all(), got[:, 0]
    x = torch.full((1, 40), torch.nan, dtype=path.dtype, device=path.device)
    one = Rows.build([1], [0], [-1], [1], [0], [0], max_short=1, device=path.device)
    assert path.conv(x, weight, None, lines, one).isnan().all()
