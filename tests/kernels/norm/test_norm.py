"""gated_rms_norm against its reference."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import gated_rms_norm, gated_rms_norm_reference

SHAPES = {
    "one-token": (1, 2, 16),
    "odd": (7, 3, 5),
    "65-tokens": (65, 2, 64),
    "empty": (0, 2, 8),
    "one-group": (3, 1, 5000),
}


@pytest.mark.parametrize("gate_first", [False, True], ids=["gate-last", "gate-first"])
@pytest.mark.parametrize("shared", [True, False], ids=["one-weight", "weights-of-heads"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_matches_the_reference(path: Path, shape: str, shared: bool, gate_first: bool) -> None:
    num_tokens, heads, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    o = torch.randn(num_tokens, heads, dim, generator=generator).to(path.device, path.dtype)
    projected = torch.randn(num_tokens, heads * dim + 5, generator=generator).to(path.device, path.dtype)
    z = projected[:, : heads * dim].unflatten(1, (heads, dim))
    weight = torch.randn(heads, dim, generator=generator).to(path.device)
    weight = weight[0] if shared else weight
    got = path.norm(o, z, weight, 1e-6, gate_first=gate_first)
    assert got.dtype == path.dtype
    assert_close("y", got, gated_rms_norm_reference(o, z, weight, 1e-6, gate_first=gate_first), path.dtype)


def test_the_reference_of_a_norm_of_what_is_gated_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    generator = torch.Generator().manual_seed(2)
    x, z = torch.randn(2, 6, 24, generator=generator)
    norm = modeling.MambaRMSNormGated(24, eps=1e-5)
    norm.weight.data = torch.randn(24, generator=generator)
    with torch.no_grad():
        want = norm(x, z)
    got = gated_rms_norm_reference(x[:, None], z[:, None], norm.weight.data, 1e-5, gate_first=True)
    assert_close("y", got, want, torch.float32)


def test_norm_of_zeros_is_zero(path: Path) -> None:
    o = torch.zeros(3, 2, 8, dtype=path.dtype, device=path.device)
    assert torch.equal(path.norm(o, torch.ones_like(o), torch.ones(8, device=path.device), 1e-6), o.flatten(1))


def test_norm_names_the_wrong_argument() -> None:
    o = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"^z: expected shape"):
        gated_rms_norm(o, o[:, :1], torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[2, 8\]"):
        gated_rms_norm(o, o, torch.ones(3, 8), 1e-6)
    with pytest.raises(TypeError, match=r"^weight: expected"):
        gated_rms_norm(o, o, torch.ones(8, dtype=torch.float16), 1e-6)
