"""gated_rms_norm against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.draws import normal
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


@pytest.mark.parametrize("gate_first", [False, True], ids=["gate-last", "gate-first"])
def test_a_gate_may_be_a_sigmoid(path: Path, gate_first: bool) -> None:
    o, z, weight = (normal(7, 3, 20, seed=seed).to(path.device, path.dtype) for seed in range(3))
    weight = weight[0, 0].float()
    x = o.double() * z.double().sigmoid() if gate_first else o.double()
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    want = want if gate_first else want * z.double().sigmoid()
    got = path.norm(o, z, weight, 1e-5, gate_first=gate_first, activation="sigmoid")
    assert_close("y", got, want.flatten(1), path.dtype)


def test_another_gate_is_refused() -> None:
    o = normal(2, 3, 8)
    with pytest.raises(ValueError, match=r"^activation: expected one of silu, sigmoid, got 'relu'"):
        gated_rms_norm(o, o, normal(8), 1e-5, activation="relu")


@pytest.mark.parametrize("groups", [1, 8])
def test_a_norm_of_what_is_gated_is_that_of_each_group(path: Path, groups: int) -> None:
    """mamba-ssm has 8 groups of 1,024 channels for Codestral-Mamba, and transformers one of all."""
    channels, eps = 1024, 1e-5
    x, z, weight = normal(7, channels).to(path.dtype), normal(7, channels, seed=1).to(path.dtype), normal(channels)
    want = x.double() * z.double() * z.double().sigmoid()
    for part in want.chunk(groups, dim=1):
        part /= (part.square().sum(1, keepdim=True) / (channels // groups) + eps).sqrt()
    want *= weight
    x, z, weight = (v.to(path.device).unflatten(-1, (groups, -1)) for v in (x, z, weight))
    assert_close("y", path.norm(x, z, weight, eps, gate_first=True), want, path.dtype)


# Family, its norm, what it is made with, groups, whether it gates first.
NORMS = [
    ("mamba2", "MambaRMSNormGated", {}, 1, True),
    ("bamba", "BambaRMSNormGated", {}, 1, True),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", {}, 1, True),
    ("nemotron_h", "Zamba2RMSNormGated", {"group_size": 24}, 4, True),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 96}, 1, True),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4, "norm_before_gate": False}, 4, True),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4, "norm_before_gate": True}, 4, False),
]


@pytest.mark.parametrize(("family", "name", "told", "groups", "gate_first"), NORMS, ids=lambda value: str(value))
def test_norms_of_transformers_are_of_these_groups(
    exact_path: Path, family: str, name: str, told: dict[str, Any], groups: int, gate_first: bool
) -> None:
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(modeling, name)(96, eps=1e-5, **told)
    norm.weight.data = normal(96, seed=1)
    x, z = normal(2, 5, 96, seed=2)
    with torch.no_grad():
        want = norm(x, z)
    x, z, weight = (v.to(exact_path.device).unflatten(-1, (groups, -1)) for v in (x, z, norm.weight.data))
    assert_close("y", exact_path.norm(x, z, weight, 1e-5, gate_first=gate_first), want, torch.float32)


def test_norm_of_zeros_is_zero(path: Path) -> None:
    o = torch.zeros(3, 2, 8, dtype=path.dtype, device=path.device)
    assert torch.equal(path.norm(o, torch.ones_like(o), torch.ones(8, device=path.device), 1e-6), o.flatten(1))


def test_norm_names_the_wrong_argument() -> None:
    o = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"^z: expected shape"):
        gated_rms_norm(o, o[:, :1], torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"^weight: expected shape \[2, 8\]"):
        gated_rms_norm(o, o, torch.ones(3, 8), 1e-6)
    with pytest.raises(ValueError, match=r"^eps: expected at least 0, got -1"):
        gated_rms_norm(o, o, torch.ones(8), -1)
    with pytest.raises(TypeError, match=r"^weight: expected"):
        gated_rms_norm(o, o, torch.ones(8, dtype=torch.float16), 1e-6)
