"""The ways a kernel runs: on a device through the public functions, or a Triton launcher in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels import (
    AdapterTiles,
    LoraWeights,
    Router,
    Rows,
    add_lora,
    add_rms_norm,
    causal_conv1d,
    gated_rms_norm,
    group_tokens,
    multiply_fp8,
    rms_norm,
    route_and_run_experts,
    route_tokens,
    run_experts,
    silu_and_mul,
    spread_slots,
)
from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.moe.weight import ExpertWeights


@dataclass(frozen=True)
class Path:
    device: str
    dtype: torch.dtype

    @property
    def narrow(self) -> torch.dtype:
        """A dtype of 16 bits: that of the path, if it has so many."""
        return torch.float16 if self.dtype == torch.float32 else self.dtype

    @property
    def serial(self) -> bool:
        """Whether short rows are computed token by token, whatever becomes of the tokens."""
        return self.device != "cpu"

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, activation: str | None = "silu"
    ) -> Tensor:
        return causal_conv1d(x, weight, bias, lines, rows, activation=activation)

    def conv_split(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, sizes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        return causal_conv1d(x, weight, bias, lines, rows, split=sizes)

    def norm(
        self, o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, activation: str = "silu"
    ) -> Tensor:
        return gated_rms_norm(o, z, weight, eps, gate_first=gate_first, activation=activation)

    def hidden_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, scale=scale)

    def silu_and_mul(self, gate_up: Tensor, limit: float = 0.0) -> Tensor:
        return silu_and_mul(gate_up, limit)

    def multiply_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
        multiply_fp8(x, weight, scales, out)

    def spread(self, row_slots: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
        return spread_slots(row_slots, query_start_loc, num_tokens)

    def group(self, token_slots: Tensor, num_slots: int, max_rank: int) -> AdapterTiles:
        return group_tokens(token_slots, num_slots, max_rank)

    def add_lora(self, x: Tensor, out: Tensor, weights: LoraWeights, token_slots: Tensor) -> None:
        self.add_grouped(x, out, weights, self.group(token_slots, weights.num_slots, weights.max_rank))

    def add_grouped(self, x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles) -> None:
        add_lora(x, out, weights, tiles)

    def route(
        self, logits: Tensor, router: Router, bias: Tensor | None = None, query_start_loc: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return route_tokens(logits, router, bias, query_start_loc)

    def run_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        experts: Tensor,
        activation: str = "silu",
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
        limit: float = 0.0,
    ) -> Tensor:
        return run_experts(x, gate_up, down, weights, experts, activation, gate_up_scales, down_scales, limit)

    def route_and_run(
        self,
        x: Tensor,
        logits: Tensor,
        router: Router,
        gate_up: Tensor,
        down: Tensor,
        bias: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
    ) -> Tensor:
        told = bias, query_start_loc, "silu", gate_up_scales, down_scales
        return route_and_run_experts(x, logits, router, gate_up, down, *told)


class InterpretedPath(Path):
    """Launches the Triton kernels on CPU tensors; needs TRITON_INTERPRET=1."""

    @property
    def serial(self) -> bool:
        return True

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, activation: str | None = "silu"
    ) -> Tensor:
        from deltaline_kernels.conv1d.launch import causal_conv1d_triton

        y = torch.empty(x.shape, dtype=x.dtype)
        causal_conv1d_triton(ConvInputs(x, weight, bias, lines, activation == "silu"), rows, (y,))
        return y

    def conv_split(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, sizes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        from deltaline_kernels.conv1d.launch import causal_conv1d_triton

        parts = tuple(torch.empty(x.shape[0], size, dtype=x.dtype) for size in sizes)
        causal_conv1d_triton(ConvInputs(x, weight, bias, lines, silu=True), rows, parts)
        return parts

    def norm(
        self, o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, activation: str = "silu"
    ) -> Tensor:
        from deltaline_kernels.norm.kernel import gated_rms_norm_triton

        y = torch.empty(o.shape[0], o.shape[1] * o.shape[2], dtype=o.dtype)
        gated_rms_norm_triton(o, z, weight, eps, y, gate_first=gate_first, activation=activation)
        return y

    def hidden_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from deltaline_kernels.norm.hidden import rms_norm_triton

        y = torch.empty(x.shape, dtype=x.dtype)
        rms_norm_triton(x, weight, eps, y)
        return y

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float) -> tuple[Tensor, Tensor]:
        from deltaline_kernels.norm.hidden import add_rms_norm_triton

        total, y = torch.empty(x.shape, dtype=residual.dtype), torch.empty(x.shape, dtype=x.dtype)
        add_rms_norm_triton(x, residual, weight, eps, scale, total, y)
        return total, y

    def silu_and_mul(self, gate_up: Tensor, limit: float = 0.0) -> Tensor:
        from deltaline_kernels.activation.kernel import silu_and_mul_triton

        y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        silu_and_mul_triton(gate_up, y, limit)
        return y

    def multiply_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
        from deltaline_kernels.fp8.launch import multiply_fp8_triton

        if len(x) > 0:
            multiply_fp8_triton(x, weight, scales, out)

    def spread(self, row_slots: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
        from deltaline_kernels.lora.spread import spread_slots_triton

        token_slots = torch.full((num_tokens,), 99, dtype=torch.int32)
        if num_tokens > 0:
            spread_slots_triton(row_slots, query_start_loc, token_slots)
        return token_slots

    def group(self, token_slots: Tensor, num_slots: int, max_rank: int) -> AdapterTiles:
        from deltaline_kernels.device.group import group_triton

        made = group_tokens(token_slots, num_slots, max_rank)
        slots, tokens = torch.full_like(made.slots, 99), torch.full_like(made.tokens, 99)
        if made.num_tiles > 0:
            group_triton(token_slots, num_slots, slots, tokens)
        return AdapterTiles(slots, tokens, made.num_tokens, made.num_slots)

    def add_grouped(self, x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles) -> None:
        from deltaline_kernels.lora.launch import add_lora_triton

        if tiles.num_tiles > 0:
            add_lora_triton(x, out, weights, tiles)

    def route(
        self, logits: Tensor, router: Router, bias: Tensor | None = None, query_start_loc: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from deltaline_kernels.moe.route import route_triton

        weights = torch.full((logits.shape[0], router.num_choices), torch.nan)
        experts = torch.full(weights.shape, 99, dtype=torch.int32)
        route_triton(logits, router, bias, query_start_loc, weights, experts)
        return weights, experts

    def run_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        experts: Tensor,
        activation: str = "silu",
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
        limit: float = 0.0,
    ) -> Tensor:
        from deltaline_kernels.moe.launch import run_experts_triton

        out, halves = torch.empty(x.shape, dtype=x.dtype), 2 if activation == "silu" else 1
        first, second = ExpertWeights(gate_up, gate_up_scales, halves), ExpertWeights(down, down_scales)
        run_experts_triton(x, first, second, weights, experts, out, gated=activation == "silu", limit=limit)
        return out

    def route_and_run(
        self,
        x: Tensor,
        logits: Tensor,
        router: Router,
        gate_up: Tensor,
        down: Tensor,
        bias: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
    ) -> Tensor:
        from deltaline_kernels.moe.launch import route_and_run_triton

        weights, out = torch.full((len(x), router.num_choices), torch.nan), torch.empty(x.shape, dtype=x.dtype)
        experts = torch.full(weights.shape, 99, dtype=torch.int32)
        routed = bias, query_start_loc, weights, experts
        first, second = ExpertWeights(gate_up, gate_up_scales, 2), ExpertWeights(down, down_scales)
        route_and_run_triton(x, logits, router, first, second, *routed, out, gated=True, limit=0.0)
        return out
