"""Mixtures of experts: each token is routed to a few of them, and gets the weighted sum of what they make of it."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, FP8, FP8_BLOCK, check_tensor, parse_number
from deltaline_kernels.device.sizes import cdiv
from deltaline_kernels.moe.cpu import route_cpu, run_experts_cpu
from deltaline_kernels.moe.reference import (
    route_and_run_experts_reference,
    route_tokens_reference,
    run_experts_reference,
)
from deltaline_kernels.moe.router import MAX_EXPERTS, MAX_TOP_K, Router
from deltaline_kernels.moe.weight import ExpertWeights
from deltaline_kernels.operators import operator

# What an expert does with its inner channels: silu of half of them times the other half, or their squared relu.
SILU, RELU2 = "silu", "relu2"

__all__ = [
    "MAX_EXPERTS",
    "MAX_TOP_K",
    "Router",
    "route_and_run_experts",
    "route_and_run_experts_reference",
    "route_tokens",
    "route_tokens_reference",
    "run_experts",
    "run_experts_reference",
]


def _fake_routes(logits: Tensor, router: Router, **_: Any) -> tuple[Tensor, Tensor]:
    size = logits.shape[0], router.top_k + router.num_shared
    return logits.new_empty(size, dtype=torch.float32), logits.new_empty(size, dtype=torch.int32)


def _fake_output(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(_fake_routes, results=2)
def route_tokens(
    logits: Tensor, router: Router, bias: Tensor | None = None, query_start_loc: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights `[T, C]` fp32 and the experts `[T, C]` int32 of each token, C `top_k + num_shared`.

    Those of the router come in falling order of their scores (with the bias), of equal ones the lowest expert first,
    and the shared ones behind them. NaN counts as the least score: such a token has experts, and weights that are NaN.
    Does not wait for the device.

    Args:
        logits: `[T, E]` fp32, bf16 or fp16, a row stride is fine, E 1..4096; with `shared_gate` one column more, the
            logit of that gate. The scores are fp32.
        bias: `[E]` fp32, contiguous: added to the scores where experts are chosen, not to the weights.
        query_start_loc: `[N+1]` int32, contiguous, where rows start in packed tokens: those from its last value on are
            padding, whose weights are 0 and whose experts are -1. None: there is no padding.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    num_tokens, device = _check_routes(logits, router, bias, query_start_loc), logits.device
    weights = torch.empty((num_tokens, router.num_choices), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, router.num_choices), dtype=torch.int32, device=device)
    if num_tokens > 0:
        if device.type == "cpu":
            route_cpu(logits, router, bias, query_start_loc, weights, experts)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.moe.route import route_triton

            route_triton(logits, router, bias, query_start_loc, weights, experts)
    return weights, experts


@operator(_fake_output)
def run_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str = SILU,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Return `[T, H]` in x.dtype: the weighted sum over each token's experts, in the order in which it has them.

        out[t] = sum over c of weights[t, c] D (silu(G x[t]) * (U x[t])),  G, U, D those of expert experts[t, c]
        out[t] = sum over c of weights[t, c] D relu(U x[t]) ** 2,  with the activation "relu2"

    Does not wait for the device, nor depends how it computes on what `experts` holds.

    Args:
        x: `[T, H]` fp32, bf16 or fp16, a row stride is fine.
        gate_up: `[E, 2 I, H]`, G above U, or U alone `[E, I, H]` with the activation "relu2"; and down: `[E, H, I]`,
            both contiguous and in x.dtype, or both in e4m3 (float8_e4m3fn); shared experts are the last ones of E.
        weights: `[T, C]` fp32, contiguous. experts: `[T, C]` int32, contiguous; every value outside 0..E-1, such as
            -1, stands for none, whose weight does not count. A token without experts gets zeros.
        activation: "silu" or "relu2".
        gate_up_scales: of weights in e4m3 `[E, 2 ceil(I / 128), ceil(H / 128)]` fp32, contiguous: what each block of
            128 by 128 of G, and below them each of U, is multiplied with; or `[E, ceil(I / 128), ceil(H / 128)]` of U
            alone. down_scales: `[E, ceil(H / 128), ceil(I / 128)]`. None of other weights.
        limit: above 0, G x is at most that before its silu, and U x within it, of "silu" alone.

    Of weights in e4m3 nothing is rounded that is not of others: 16 bits hold their values, and scales meet fp32.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    first, second = _check_experts(x, gate_up, down, activation, gate_up_scales, down_scales)
    limit = _parse_limit(limit, activation)
    num_tokens, device = x.shape[0], x.device
    check_tensor("weights", weights, (num_tokens, None), (torch.float32,), device)
    if weights.shape[1] < 1:
        raise ValueError(f"weights: expected at least 1 choice per token, got shape {list(weights.shape)}")
    check_tensor("experts", experts, tuple(weights.shape), (torch.int32,), device)
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    if num_tokens > 0:
        if device.type == "cpu":
            run_experts_cpu(x, first, second, weights, experts, out, gated=activation == SILU, limit=limit)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.moe.launch import run_experts_triton

            run_experts_triton(x, first, second, weights, experts, out, gated=activation == SILU, limit=limit)
    return out


@operator(_fake_output)
def route_and_run_experts(
    x: Tensor,
    logits: Tensor,
    router: Router,
    gate_up: Tensor,
    down: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    activation: str = SILU,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Return `[T, H]` in x.dtype: what `run_experts` makes of the routes that `route_tokens` makes.

    On a GPU few tokens take less time so: what does not need the routes is done while they are made.

    Args:
        logits, router, bias, query_start_loc: as `route_tokens` has them.
        x, gate_up, down, activation, gate_up_scales, down_scales, limit: as `run_experts` has them; of E experts the
            last `num_shared` are the shared ones.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    num_tokens, device = _check_routes(logits, router, bias, query_start_loc), x.device
    check_tensor("x", x, (num_tokens, None), ACTIVATIONS, logits.device, row_stride=True)
    first, second = _check_experts(x, gate_up, down, activation, gate_up_scales, down_scales)
    limit = _parse_limit(limit, activation)
    count = logits.shape[1] - router.shared_gate + router.num_shared
    if len(down) != count:
        raise ValueError(f"down: expected {count} experts, those of the logits and the shared ones, got {len(down)}")
    weights = torch.empty((num_tokens, router.num_choices), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, router.num_choices), dtype=torch.int32, device=device)
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    if num_tokens > 0:
        if device.type == "cpu":
            route_cpu(logits, router, bias, query_start_loc, weights, experts)
            run_experts_cpu(x, first, second, weights, experts, out, gated=activation == SILU, limit=limit)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.moe.launch import route_and_run_triton

            routed = bias, query_start_loc, weights, experts
            route_and_run_triton(x, logits, router, first, second, *routed, out, gated=activation == SILU, limit=limit)
    return out


def _parse_limit(limit: float, activation: str) -> float:
    """Return a limit as a float; raise TypeError or ValueError where it is none, or of another activation."""
    limit = parse_number("limit", limit)
    if limit < 0 or (limit > 0 and activation != SILU):
        raise ValueError(f"limit: expected at least 0, and 0 with {activation}, got {limit}")
    return limit


def _check_routes(logits: Tensor, router: Router, bias: Tensor | None, query_start_loc: Tensor | None) -> int:
    """Check what routes are made of; return the number of tokens."""
    if not isinstance(router, Router):
        raise TypeError(f"router: expected a Router, got {type(router).__name__}")
    check_tensor("logits", logits, (None, None), ACTIVATIONS, None, row_stride=True)
    device = logits.device
    num_experts = logits.shape[1] - router.shared_gate
    router.check_experts(num_experts, has_bias=bias is not None)
    if bias is not None:
        check_tensor("bias", bias, (num_experts,), (torch.float32,), device)
    if query_start_loc is not None:
        check_tensor("query_start_loc", query_start_loc, (None,), (torch.int32,), device)
        if query_start_loc.shape[0] < 1:
            raise ValueError("query_start_loc: expected shape [N+1], got [0]")
    return logits.shape[0]


def _check_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Check tokens and the experts' weights; return these."""
    if activation not in (SILU, RELU2):
        raise ValueError(f"activation: expected {SILU} or {RELU2}, got {activation!r}")
    halves = 2 if activation == SILU else 1
    check_tensor("x", x, (None, None), ACTIVATIONS, None, row_stride=True)
    device, width = x.device, x.shape[1]
    check_tensor("gate_up", gate_up, (None, None, width), (x.dtype, FP8), device)
    num_experts, both, _ = gate_up.shape
    if num_experts < 1 or width < 1 or both < halves or both % halves:
        rows = "2 I" if halves == 2 else "I"
        raise ValueError(f"gate_up: expected shape [E, {rows}, H], none of them 0, got {list(gate_up.shape)}")
    inner = both // halves
    check_tensor("down", down, (num_experts, width, inner), (gate_up.dtype,), device)
    scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
    if gate_up.dtype == FP8:
        blocks, of_width = cdiv(inner, FP8_BLOCK), cdiv(width, FP8_BLOCK)
        shapes = (num_experts, halves * blocks, of_width), (num_experts, of_width, blocks)
        for (name, one), shape in zip(scales.items(), shapes, strict=True):
            check_tensor(name, one, shape, (torch.float32,), device)
    elif found := [name for name, one in scales.items() if one is not None]:
        raise ValueError(f"{found[0]}: expected None beside weights in {gate_up.dtype}, got a tensor")
    return ExpertWeights(gate_up, gate_up_scales, halves), ExpertWeights(down, down_scales)
