"""Experts under vLLM's name and arguments."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rigs.kernels.expert_batches import Batch, make_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from torch import Tensor

from deltaline_kernels import run_experts
from deltaline_kernels.compat import fused_experts


def call(batch: Batch, **told: Any) -> Tensor:
    return fused_experts(batch.x, batch.gate_up, batch.down, batch.weights, told.pop("ids", batch.experts), **told)


def test_it_is_our_operation(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5)
    want = run_experts(**vars(batch))
    assert same_bits(call(batch), want)
    assert same_bits(call(batch, ids=batch.experts.long(), global_num_experts=5), want)


def test_weights_in_fp8_have_their_scales_by_name(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5, 256, 128).in_fp8()
    told = {"use_fp8_w8a8": True, "w1_scale": batch.gate_up_scales, "w2_scale": batch.down_scales}
    assert same_bits(call(batch, **told, block_shape=[128, 128]), run_experts(**vars(batch)))


class Activation(Enum):
    """As vLLM's has it."""

    SILU = "silu"
    GELU = "gelu"


def config(dtype: torch.dtype | None = None, **told: Any) -> SimpleNamespace:
    """Return the attributes of vLLM's FusedMoEQuantConfig that say how weights of one dtype are quantised."""
    names = ("w1_scale", "w2_scale", "a1_scale", "a2_scale", "block_shape", "w1_bias", "w2_bias", "gemm1_clamp_limit")
    is_fp8 = dtype == torch.float8_e4m3fn
    return SimpleNamespace(**dict.fromkeys(names) | {"quant_dtype": dtype, "use_fp8_w8a8": is_fp8} | told)


def test_a_config_says_what_else_is_said_by_name(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5, 256, 128)
    assert same_bits(call(batch, quant_config=config(), activation=Activation.SILU), run_experts(**vars(batch)))
    batch = batch.in_fp8()
    told = {"w1_scale": batch.gate_up_scales, "w2_scale": batch.down_scales, "block_shape": [128, 128]}
    given = call(batch, quant_config=config(torch.float8_e4m3fn, **told))
    assert same_bits(given, run_experts(**vars(batch)))


def test_weights_may_be_padded(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5)
    gate_up, down = (F.pad(weight, (0, 128))[..., :-128] for weight in (batch.gate_up, batch.down))
    assert same_bits(call(replace(batch, gate_up=gate_up, down=down)), run_experts(**vars(batch)))


def test_neutral_arguments_of_older_releases_are_taken(path: Path) -> None:
    """By name; compiled, too."""
    batch = make_batch(path, 9, 2, 5)
    flags = "use_fp8_w8a8 use_int8_w8a8 use_int8_w8a16 use_int4_w4a16 use_mxfp4_w4a4 per_channel_quant"
    nothing = "ocp_mx_scheme w1_scale w2_scale w1_zp w2_zp w1_bias w2_bias a1_scale a2_scale block_shape clamp_limit"
    told: dict[str, Any] = dict.fromkeys(flags.split(), False) | dict.fromkeys(nothing.split())
    told |= {"allow_deep_gemm": True, "allow_cutlass_block_scaled_grouped_gemm": False}
    want = run_experts(**vars(batch))
    assert same_bits(call(batch, **told), want)
    assert same_bits(torch.compile(call, fullgraph=True, backend="eager")(batch, **told), want)


def test_in_place_it_overwrites_the_tokens(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5)
    want = call(batch)
    assert call(batch, inplace=True) is batch.x
    assert same_bits(batch.x, want)


def test_map_names_the_experts_of_this_process(path: Path) -> None:
    batch = make_batch(path, 9, 2, 3)
    held = torch.tensor([-1, 2, -1, 0, 1], dtype=torch.int32, device=path.device)
    everywhere = torch.tensor([3, 4, 1, 99, -1, 0], device=path.device)
    here = torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32, device=path.device)
    numbers = torch.arange(18, device=path.device).remainder(6).view(9, 2)
    batch.gate_up.copy_(torch.ones_like(batch.gate_up))
    batch.down.copy_(torch.ones_like(batch.down))
    batch.weights.copy_(torch.ones_like(batch.weights))
    want = run_experts(batch.x, batch.gate_up, batch.down, batch.weights, here[numbers])
    assert same_bits(call(batch, ids=everywhere[numbers], expert_map=held), want)


def test_wide_numbers_that_are_no_expert_stay_none(path: Path) -> None:
    batch = make_batch(path, 3, 2, 3)
    wide = torch.full((3, 2), 1 << 32, device=path.device)
    assert not call(batch, ids=wide).any()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"activation": "gelu"}, "activation: expected 'silu', the only one that is offered, got 'gelu'"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input: expected False"),
        ({"use_fp8_w8a8": True}, "block_shape: expected [128, 128], got None"),
        ({"use_fp8_w8a8": True, "block_shape": 128}, "block_shape: expected [128, 128], got 128"),
        ({"use_fp8_w8a8": True, "block_shape": [128, 128]}, "w2: expected a multiple of 128"),
        ({"activation": Activation.GELU}, "activation: expected 'silu', the only one"),
        ({"quant_config": config(torch.int8)}, "quant_config: expected weights in e4m3 or not quantised"),
        ({"quant_config": config(w1_bias=torch.ones(1))}, "quant_config: expected w1_bias None"),
        ({"quant_config": config(torch.float8_e4m3fn)}, "block_shape: expected [128, 128], got None"),
        ({"quant_config": config(), "use_fp8_w8a8": True}, "use_fp8_w8a8: expected False beside quant_config"),
        ({"a1_scale": torch.ones(1)}, "a1_scale: expected None, as tokens are not quantised"),
        ({"use_int8_w8a16": True}, "use_int8_w8a16: expected False, the only meaning that is offered"),
        ({"per_channel_quant": True}, "per_channel_quant: expected False, the only meaning"),
        ({"w1_zp": torch.ones(1)}, "w1_zp: expected None, the only meaning that is offered"),
        ({"clamp_limit": 7.0}, "clamp_limit: expected None, the only meaning that is offered, got 7.0"),
        ({"expert_map": torch.zeros(0, dtype=torch.int32)}, "expert_map: expected at least 1 expert, got none"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int32)}, "topk_ids: expected shape"),
    ],
)
def test_other_meanings_are_refused(told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        call(make_batch(Path("cpu", torch.float32), 3, 2, 4), **told)


def test_other_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^use_fp8_w8a16: expected no argument of this name"):
        call(make_batch(Path("cpu", torch.float32), 3, 2, 4), use_fp8_w8a16=False)


def test_a_config_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^quant_config: expected a FusedMoEQuantConfig, got 'fp8'"):
        call(make_batch(Path("cpu", torch.float32), 3, 2, 4), quant_config="fp8")


@pytest.mark.parametrize(("name", "place"), [("w1", "gate_up"), ("w2", "down")])
def test_weights_that_are_none_are_refused_by_name(name: str, place: str) -> None:
    nothing: dict[str, Any] = {place: None}
    batch = replace(make_batch(Path("cpu", torch.float32), 3, 2, 4), **nothing)
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got NoneType"):
        call(batch)
