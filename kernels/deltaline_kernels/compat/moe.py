"""Experts as vLLM calls them: `fused_experts`, of tokens whose experts are chosen."""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, Unpack

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, FP8, FP8_BLOCK
from deltaline_kernels.compat.arguments import (
    INTEGERS,
    UnusedExperts,
    check_flag,
    check_operand,
    check_unused,
    describe,
)
from deltaline_kernels.moe import run_experts
from deltaline_kernels.operators import operator

# Whether weights are in e4m3, the scales of w1, of w2 and of tokens, and the sizes of a block.
Quantisation = tuple[bool, Tensor | None, Tensor | None, tuple[object, object], Sequence[int] | None]


def _fake(hidden_states: Tensor, inplace: bool, **_: Any) -> Tensor:
    return hidden_states if inplace else hidden_states.new_empty(hidden_states.shape)


@operator(
    _fake,
    mutates=["hidden_states"],
    only={"activation": str, "quant_config": NoneType},
    unused=partial(check_unused, kind=UnusedExperts),
)
def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: str | Enum = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    quant_config: Any = None,
    *,
    use_fp8_w8a8: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: None = None,
    a2_scale: None = None,
    block_shape: Sequence[int] | None = None,
    **unused: Unpack[UnusedExperts],
) -> Tensor:
    """Return the weighted sum over the experts of each token `[T, H]`, as `run_experts` does.

    Args:
        hidden_states: `[T, H]` bf16, fp16 or fp32, of any strides. Mutated with `inplace`, which returns it.
        w1: `[E, 2 I, H]`, gate above up. w2: `[E, H, I]`. Both in hidden_states.dtype, or in e4m3. One that is not
            contiguous, as padded weights are, is copied with each call.
        topk_weights: `[T, C]` fp32, bf16 or fp16. topk_ids: `[T, C]` int32 or int64; below 0 or beyond the last
            expert: none.
        activation: "silu", or an enum of that value, the only one that is offered. apply_router_weight_on_input: False
            alone.
        global_num_experts: of all processes, -1 for E; needed nowhere.
        expert_map: `[experts of all processes]` int32 or int64, which of w1 and w2 an expert is, -1 for none of
            them; None: they are those that `topk_ids` names.
        quant_config: vLLM's FusedMoEQuantConfig, which says in place of the arguments below how the weights are
            quantised: not at all, or as with use_fp8_w8a8. Of biases and limits it has none.
        use_fp8_w8a8: w1 and w2 are in e4m3, in blocks of block_shape, (128, 128), that w1_scale
            `[E, 2 I / 128, ceil(H / 128)]` and w2_scale `[E, ceil(H / 128), I / 128]` fp32 are to be multiplied with.
            Tokens keep their 16 bits, so that a1_scale and a2_scale are None.
        unused: what older releases pass, and changes nothing (`UnusedExperts`).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedExperts)
    check_operand("hidden_states", hidden_states, {"tokens": None, "hidden": None})
    device, size = hidden_states.device, {"tokens": hidden_states.shape[0], "choices": None}
    check_operand("topk_weights", topk_weights, size, ACTIVATIONS, device, "hidden_states")
    check_operand("topk_ids", topk_ids, {**size, "choices": topk_weights.shape[1]}, INTEGERS, device, "hidden_states")
    sizes = {"experts": None, "out": None, "in": None}
    for name, weight in (("w1", w1), ("w2", w2)):
        check_operand(name, weight, sizes, (*ACTIVATIONS, FP8), device, "hidden_states")
    activation = activation.value if isinstance(activation, Enum) else activation
    if activation != "silu":
        raise ValueError(f"activation: expected 'silu', the only one that is offered, got {describe(activation)}")
    if apply_router_weight_on_input:
        raise ValueError("apply_router_weight_on_input: expected False, the only meaning that is offered, got True")
    experts = _find_experts(topk_ids, expert_map, w1.shape[0])
    told: Quantisation = (use_fp8_w8a8, w1_scale, w2_scale, (a1_scale, a2_scale), block_shape)
    if quant_config is not None:
        if use_fp8_w8a8:
            raise ValueError("use_fp8_w8a8: expected False beside quant_config, got True")
        told = _read_config(quant_config)
    scales = _check_scales(w2, *told)
    x, w1, w2 = hidden_states.contiguous(), w1.contiguous(), w2.contiguous()
    routes = topk_weights.float().contiguous(), experts.contiguous()
    out = run_experts(x, w1, w2, *routes, gate_up_scales=scales[0], down_scales=scales[1])
    return hidden_states.copy_(out) if inplace else out


def _find_experts(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Return which of the weights a choice is, int32, below 0 or beyond the last: none. Raises as `fused_experts`."""
    experts = topk_ids
    if expert_map is not None:
        check_operand("expert_map", expert_map, {"experts": None}, INTEGERS, topk_ids.device, "hidden_states")
        last = expert_map.shape[0] - 1
        if last < 0:
            raise ValueError("expert_map: expected at least 1 expert, got none")
        experts = torch.where((topk_ids < 0) | (topk_ids > last), -1, expert_map[topk_ids.clamp(0, last).long()])
    # What is no expert here stays none when it is narrowed.
    return experts if experts.dtype == torch.int32 else experts.clamp(-1, num_experts).to(torch.int32)


def _read_config(config: Any) -> Quantisation:
    """Return what a FusedMoEQuantConfig says of weights. Raises as `fused_experts`."""
    if not hasattr(config, "quant_dtype"):
        raise TypeError(f"quant_config: expected a FusedMoEQuantConfig, got {describe(config)}")
    for name in ("w1_bias", "w2_bias", "gemm1_clamp_limit"):
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"quant_config: expected {name} None, the only one offered, got {describe(value)}")
    if config.quant_dtype is None:
        return False, None, None, (None, None), None
    if not config.use_fp8_w8a8:
        raise ValueError(f"quant_config: expected weights in e4m3 or not quantised, got {config.quant_dtype}")
    return True, config.w1_scale, config.w2_scale, (config.a1_scale, config.a2_scale), config.block_shape


def _check_scales(
    w2: Tensor,
    is_fp8: bool,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    of_tokens: tuple[object, object],
    block_shape: Sequence[int] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of w1 and w2, None of weights that have none. Raises as `fused_experts`."""
    check_flag("use_fp8_w8a8", is_fp8)
    for name, scale in zip(("a1_scale", "a2_scale"), of_tokens, strict=True):
        if scale is not None:
            raise ValueError(f"{name}: expected None, as tokens are not quantised, got {describe(scale)}")
    if not is_fp8:
        return None, None
    if not isinstance(block_shape, Sequence) or list(block_shape) != [FP8_BLOCK, FP8_BLOCK]:
        raise ValueError(f"block_shape: expected [{FP8_BLOCK}, {FP8_BLOCK}], got {block_shape}")
    if w2.shape[2] % FP8_BLOCK:
        raise ValueError(f"w2: expected a multiple of {FP8_BLOCK} channels of an expert, got {w2.shape[2]}")
    for name, given in (("w1_scale", w1_scale), ("w2_scale", w2_scale)):
        if given is None:
            raise TypeError(f"{name}: expected a tensor, as use_fp8_w8a8 is True, got None")
    return w1_scale, w2_scale
