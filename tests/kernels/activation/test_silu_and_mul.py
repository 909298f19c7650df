"""silu_and_mul against its reference."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import silu_and_mul, silu_and_mul_reference

SHAPES = {
    "one-token": (1, 64),
    "one-channel": (5, 1),
    "odd": (7, 5),
    "65-tokens": (65, 200),
    "several-programs": (3, 2500),
    "empty": (0, 8),
    "no-channels": (3, 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_activation_matches_the_reference(path: Path, shape: str) -> None:
    num_tokens, width = SHAPES[shape]
    wide = (3.0 * normal(num_tokens, 2 * width + 3)).to(path.device, path.dtype)
    gate_up = wide[:, : 2 * width]
    before = gate_up.clone()
    got = path.silu_and_mul(gate_up)
    assert got.dtype == path.dtype and got.is_contiguous()
    assert_close("y", got, silu_and_mul_reference(gate_up.double()), path.dtype)
    assert torch.equal(gate_up, before)


def test_gates_are_limited_from_above_and_what_they_multiply_from_both_sides(path: Path) -> None:
    gate_up = (3.0 * normal(9, 200)).to(path.device, path.dtype)
    gate_up[0, 0], gate_up[1, 100] = torch.nan, torch.nan
    got = path.silu_and_mul(gate_up, 0.75)
    assert_close("y", got, silu_and_mul_reference(gate_up.double(), 0.75), path.dtype)
    assert got[0, 0].isnan() and got[1, 0].isnan() and float(got.nan_to_num(0.0).abs().max()) < 0.75
    with pytest.raises(ValueError, match=r"^limit: expected at least 0, got -1"):
        silu_and_mul(gate_up, -1.0)


def test_activation_is_rounded_as_models_round_it(path: Path) -> None:
    """Once behind silu, once behind the product; rounded once, a fifth of the bits would differ."""
    gate_up = normal(40, 1000).to(path.device, path.dtype)
    exact = silu_and_mul_reference(gate_up)
    differs = path.silu_and_mul(gate_up) != exact
    assert path.dtype == torch.float32 or float(differs.double().mean()) < 0.01


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 7.01), (torch.float16, 70000.0)], ids=str)
def test_a_limit_is_not_rounded(dtype: torch.dtype, limit: float) -> None:
    """To a dtype that has no such number, or none so large."""
    gate_up = (8.0 * normal(9, 400)).to(dtype)
    gate_up[0, 0] = torch.inf
    assert torch.equal(silu_and_mul(gate_up, limit), silu_and_mul_reference(gate_up, limit))


def test_activation_is_right_far_from_zero(path: Path) -> None:
    gates = torch.tensor([-1e4, -95.0, -88.0, -20.0, 0.0, 20.0, 1e4, torch.inf, torch.nan])
    up = torch.tensor([1.0, -2.0, 0.0]).repeat(3)
    gate_up = torch.cat((gates, up)).to(path.device, path.dtype)[None]
    assert_close("y", path.silu_and_mul(gate_up), silu_and_mul_reference(gate_up), path.dtype)


def test_a_token_does_not_depend_on_its_neighbours(path: Path) -> None:
    """Nor on how many there are; and a repeat has the same bits."""
    gate_up = normal(9, 2 * 1500).to(path.device, path.dtype)
    whole, others = path.silu_and_mul(gate_up), gate_up.clone()
    others[:4], others[5:] = torch.nan, torch.nan
    assert torch.equal(path.silu_and_mul(gate_up), whole)
    assert torch.equal(path.silu_and_mul(others)[4], whole[4])
    assert torch.equal(path.silu_and_mul(gate_up[4:5])[0], whole[4])


def test_activation_names_the_wrong_argument() -> None:
    with pytest.raises(ValueError, match=r"^gate_up: expected an even number of channels, got 7"):
        silu_and_mul(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"^gate_up: expected packed rows"):
        silu_and_mul(torch.zeros(8, 3).t())
    with pytest.raises(TypeError, match=r"^gate_up: expected torch.float32 or .*, got torch.int32"):
        silu_and_mul(torch.zeros(3, 8, dtype=torch.int32))
