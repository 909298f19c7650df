"""The check of the kernels at the start: in the sizes that are served, and what differs is named."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.states import SCAN

from deltaline_kernels import Router
from deltaline_kernels.selftest.run import Check, run_selftest
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.expert_shape import ExpertsShape
from deltaline_server.layers.experts import expert_test_sizes
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.shapes import (
    AttentionShape,
    GatedDeltaNetShape,
    KdaShape,
    Mamba2Shape,
    QkNorm,
    ShortConvShape,
)
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models import kernel_check

CPU = torch.device("cpu")
EXPERTS = ExpertsShape(num_experts=12, top_k=3, intermediate_size=32, shared_size=40, normalises=False)


def test_kernels_that_differ_from_their_reference_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("norm, decode", 1e-6, 1e-5), Check("conv1d, decode", 0.5, 1e-5)]
    monkeypatch.setattr(kernel_check, "run_selftest", lambda *_, **__: checks)
    with pytest.raises(ModelError, match=r"device: conv1d, decode: error 0\.5, limit 1e-05$"):
        kernel_check.check_kernels(CPU, torch.float32, GatedDeltaNetShape(1, 1, 8, 8, 4), StateOptions(1, 1), {})


@pytest.mark.parametrize("adapters", [None, object()], ids=["bare", "adapters"])
def test_what_blocks_have_beside_mixers_is_checked_once(monkeypatch: pytest.MonkeyPatch, adapters: object) -> None:
    shapes, options = (GatedDeltaNetShape(1, 1, 8, 8, 4), AttentionShape(6, 2, 32, 8, 1e4, 512)), StateOptions(1, 1)
    checked = list[tuple[Any, ...]]()
    monkeypatch.setattr(kernel_check, "check_kernels", lambda *sizes: checked.append(sizes))
    gpu, beside = torch.device("meta"), {"hidden": 48, "mlp_dim": 40}
    model: Any = SimpleNamespace(
        device=gpu, dtype=torch.bfloat16, shapes=shapes * 2, block_sizes=beside, adapters=adapters
    )
    kernel_check.self_test(model, options)
    wanted = zip(shapes, (beside, {"hidden": 0}), strict=True)
    told = {"has_adapters": adapters is not None}
    assert checked == [(gpu, torch.bfloat16, shape, options, sizes | told) for shape, sizes in wanted]


def test_a_mixer_is_checked_without_what_blocks_have_beside_it() -> None:
    families = {"conv1d", "gated_delta", "norm"}
    for has_adapters, found in ((True, families | {"lora"}), (False, families)):
        checks = run_selftest(CPU, hidden=0, max_draft=1, has_adapters=has_adapters)
        assert {check.name.split(",")[0] for check in checks} == found


@pytest.mark.parametrize(
    ("shape", "beside", "sizes", "families"),
    [
        (
            GatedDeltaNetShape(2, 6, 16, 8, 3),
            {"streams": 4, "hidden": 128, "mlp_dim": 40, "fp8_sizes": ((80, 128), (128, 40))},
            {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 16, "value_dim": 8, "conv_width": 3}
            | {"streams": 4, "hidden": 128, "mlp_dim": 40, "raw_gates": False}
            | {"fp8_sizes": ((80, 128), (128, 40))},
            {"conv1d", "gated_delta", "lora", "residual", "norm", "mhc", "activation", "fp8"},
        ),
        (
            GatedDeltaNetShape(2, 6, 16, 8, 3, doubles_updates=True),
            {},
            {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 16, "value_dim": 8, "conv_width": 3}
            | {"raw_gates": True},
            {"conv1d", "gated_delta", "lora", "residual", "norm"},
        ),
        (
            KdaShape(3, 3, 16, 16, 3, -5.0),
            {},
            {"num_key_heads": 3, "num_value_heads": 3, "key_dim": 16, "value_dim": 16, "conv_width": 3}
            | {"recurrence": "kda", "lower_bound": -5.0},
            {"conv1d", "kda", "lora", "residual", "norm"},
        ),
        (
            Mamba2Shape(2, 4, 16, 8, 3, 1, (0.1, math.inf), has_conv_bias=True, has_bias=False),
            {},
            {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 8, "conv_width": 3}
            | {"norm_groups": 1, "dt_limit": (0.1, math.inf), "has_conv_bias": True, "recurrence": "mamba2"}
            | {"norms_first": False},
            {"conv1d", "mamba2", "lora", "residual", "norm"},
        ),
        (
            SCAN,
            {},
            {"num_key_heads": 0, "num_value_heads": 1, "key_dim": 5, "value_dim": 32, "conv_width": 4}
            | {"has_conv_bias": True, "recurrence": "mamba1"},
            {"conv1d", "mamba1", "lora", "residual"},
        ),
        (
            ShortConvShape.of(24, 3, has_bias=True),
            {},
            {"num_key_heads": 0, "num_value_heads": 3, "value_dim": 8, "conv_width": 3, "has_conv_bias": True}
            | {"recurrence": "short_conv"},
            {"conv1d", "lora", "residual"},
        ),
        (
            AttentionShape(6, 2, 32, 8, 1e4, 512),
            {"hidden": 48} | expert_test_sizes(EXPERTS.shard(2)),
            {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 32, "value_dim": 32, "rotary_dim": 8}
            | {"page_size": 32, "recurrence": "attention", "is_gated": True, "norms_heads": True}
            | {"hidden": 48, "num_experts": 12, "expert_dim": 16}
            | {"router": Router(3, normalize=False, num_shared=2, shared_gate=True), "expert_activation": "silu"},
            {"attention", "lora", "residual", "rotary", "moe"},
        ),
        (
            AttentionShape(6, 2, 32, 0, 1.0, 512, is_gated=False, qk_norm=QkNorm.NONE),
            {},
            {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 32, "value_dim": 32, "rotary_dim": 2}
            | {"page_size": 32, "recurrence": "attention", "is_gated": False, "norms_heads": False},
            {"attention", "lora", "residual", "rotary"},
        ),
        (
            LatentShape(6, 20, 4, 16, 12, query_rank=0, max_positions=512),
            {},
            {"num_key_heads": 1, "num_value_heads": 6, "key_dim": 24, "value_dim": 20, "rotary_dim": 2}
            | {"page_size": 32, "recurrence": "latent_attention"},
            {"latent attention", "lora", "residual", "rotary"},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kernels_are_checked_in_the_sizes_that_are_served(
    monkeypatch: pytest.MonkeyPatch, shape: Any, beside: dict[str, Any], sizes: dict[str, Any], families: set[str]
) -> None:
    checked: dict[str, Any] = {}
    names = set[str]()

    def run(*inputs: Any, **given: Any) -> list[Check]:
        checked.update(given, inputs=inputs)
        checks = run_selftest(*inputs, **given)
        names.update(check.name.split(",")[0] for check in checks)
        return checks

    monkeypatch.setattr(kernel_check, "run_selftest", run)
    options = StateOptions(1, 5, state_dtype=torch.bfloat16, page_size=32)
    kernel_check.check_kernels(CPU, torch.float32, shape, options, beside)
    assert checked == sizes | {"inputs": (CPU, torch.float32), "max_draft": 5, "state_dtype": torch.bfloat16}
    assert names == families
