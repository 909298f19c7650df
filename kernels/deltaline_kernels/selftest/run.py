"""Compares every kernel family with its reference on small inputs, on the device that is to serve.

Wrong code from an assembler shows here before it shows in an answer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.conv1d import causal_conv1d, causal_conv1d_reference
from deltaline_kernels.gated_delta import gated_delta, gated_delta_reference
from deltaline_kernels.gated_delta.inputs import DeltaHeads
from deltaline_kernels.gated_delta.plan import choose_plan
from deltaline_kernels.mamba2 import mamba2, mamba2_reference
from deltaline_kernels.mamba2.chunk_plan import choose_plan as choose_mamba_plan
from deltaline_kernels.mamba2.inputs import MambaHeads
from deltaline_kernels.norm import gated_rms_norm, gated_rms_norm_reference
from deltaline_kernels.rows import Rows
from deltaline_kernels.selftest.attention import attention_batches, compare_attention
from deltaline_kernels.selftest.batches import batches, short_batches
from deltaline_kernels.selftest.lora import compare_lora
from deltaline_kernels.selftest.mhc import compare_mhc

# Tokens of a row that is computed in parts, where heads are few enough for that.
LONG = 4096
# Tokens of batches of several adapters: more than 128 of one adapter; on a GPU large and dense tiles too.
ADAPTED, ADAPTED_GPU = (1, 40, 250), (1, 40, 250, 600, 1200)
# Largest difference, relative to the largest value of the reference (at least 1).
LIMITS = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Check:
    """One comparison: its relative error and the limit that it must keep."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def run_selftest(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    num_key_heads: int = 2,
    num_value_heads: int = 4,
    key_dim: int = 64,
    value_dim: int = 64,
    conv_width: int = 4,
    max_draft: int = 4,
    state_dtype: torch.dtype = torch.float32,
    recurrence: str = "gated_delta",
    norm_groups: int | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    has_conv_bias: bool = False,
    rotary_dim: int = 16,
    page_size: int = 64,
    streams: int = 0,
    hidden: int = 64,
) -> list[Check]:
    """Run every family that a model has on `device` with inputs of `dtype`; wait for the device.

    The sizes are constants of the compiled kernels: with a model's own, what is compared is what serves it.

    Args:
        recurrence: the mixer's, "gated_delta", "mamba2" or "attention". Groups, heads, state dim and head dim of Mamba2
            are key heads, value heads, key dim and value dim here; key-value heads, heads and head dim of attention are
            key heads, value heads and key dim.
        norm_groups: parts of a Mamba2 layer's channels that its norm takes one by one; None: its groups.
        dt_limit: least and greatest time step of a Mamba2 layer.
        has_conv_bias: whether the convolution of a Mamba2 layer has a bias.
        rotary_dim, page_size: of attention alone.
        streams: residual streams of `hidden` channels; 0: the model mixes none.

    Returns:
        One Check for each family and kind of input. A NaN counts as an infinite error.

    Raises:
        KeyError: `dtype` is not fp32, bf16 or fp16, or `recurrence` none of the three. TypeError, ValueError: sizes
            that the kernels don't take.
    """
    heads = DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim, key_dim**-0.5, 1e-6)
    limit = max(LIMITS[dtype], LIMITS[state_dtype])
    sizes = (heads, conv_width, max_draft, dtype, state_dtype)
    options: dict[str, Any] = {"norm_groups": norm_groups or num_key_heads, "dt_limit": dt_limit}
    attention = (num_value_heads, num_key_heads, key_dim, rotary_dim, page_size, dtype)
    mixers: dict[str, Callable[..., Iterator[tuple[str, list[Tensor], list[Tensor]]]]] = {
        "gated_delta": lambda fill, rows: _compare_delta(fill, rows, *sizes),
        "mamba2": lambda fill, rows: _compare_mamba(fill, rows, *sizes, **options, has_conv_bias=has_conv_bias),
        "attention": lambda fill, rows: compare_attention(fill, rows, *attention),
    }
    compare, is_attention = mixers[recurrence], recurrence == "attention"
    made = attention_batches(max_draft, device) if is_attention else batches(num_value_heads, max_draft, device)
    # On the device: numbers for a long row take a CPU longer than all the rest.
    generator = torch.Generator(device).manual_seed(0)
    fills: dict[str, Callable[..., Tensor]] = {
        "random": lambda *shape: torch.randn(*shape, generator=generator, device=device),
        "integers": lambda *shape: torch.randint(-2, 3, shape, generator=generator, device=device).float(),
        "ones": lambda *shape: torch.ones(*shape, device=device),
    }
    checks = []
    for kind, fill in fills.items():
        for batch, rows in made.items():
            for name, got, want in compare(fill, rows):
                checks.append(Check(f"{name}, {batch}, {kind}", _error(got, want), limit))
    on_gpu = torch.device(device).type != "cpu"
    if on_gpu and _has_parts(recurrence, heads, dtype):
        got, want = _run_in_parts(fills["random"], recurrence, heads, device, dtype, state_dtype)
        checks.append(Check(f"{recurrence}, prefill in parts, random", _error(got, want), limit))
    adapted = ADAPTED_GPU if on_gpu else ADAPTED
    for kind, fill in fills.items():
        for num_tokens in adapted if kind == "random" else adapted[-2:]:
            got, want = compare_lora(fill, num_tokens, heads, device, dtype)
            checks.append(Check(f"lora, {num_tokens} tokens, {kind}", _error(got, want), limit))
    for name, got, want in compare_mhc(fills, streams, hidden, dtype) if streams else ():
        checks.append(Check(name, _error(got, want), limit))
    for batch, rows in () if is_attention else short_batches(max_draft, device).items():
        got, want = _convolve(fills["random"], rows, heads, conv_width, max_draft, dtype, has_bias=has_conv_bias)
        checks.append(Check(f"conv1d, {batch}, random", _error(got, want), limit))
    return checks


def _has_parts(recurrence: str, heads: DeltaHeads, dtype: torch.dtype) -> bool:
    """Whether one long row is computed in parts; in fp32 that of Mamba2 never is."""
    if recurrence == "gated_delta":
        return choose_plan(heads, 1, LONG, LONG).num_parts > 1
    sizes = MambaHeads(heads.num_key_heads, heads.num_value_heads, heads.value_dim, heads.key_dim)
    is_cut = dtype is not torch.float32 and choose_mamba_plan(sizes, 1, LONG, LONG).num_parts > 1
    return recurrence == "mamba2" and is_cut


def _run_in_parts(
    fill: Callable[..., Tensor],
    recurrence: str,
    heads: DeltaHeads,
    device: torch.device | str,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what one long row gave in parts and, in place of the slow reference, token by token."""
    tokens = _projected(fill, LONG, heads).to(dtype)
    x, _, b, a = tokens.split((heads.channels, heads.value_channels, *[heads.num_value_heads] * 2), dim=-1)
    x = x.contiguous()  # as the convolution leaves it
    gates = fill(3, heads.num_value_heads)
    state = fill(2, heads.num_value_heads, heads.value_dim, heads.key_dim).to(state_dtype)
    drafts, results = torch.zeros(2, 2, 1, heads.record, device=device), []
    if recurrence == "mamba2":
        x[:, heads.value_channels :] *= heads.scale**0.5
    for max_short in (1, LONG):
        rows = Rows.build([LONG], [1], [1], [LONG], [0], [0], max_short=max_short, device=device)
        own = state.clone()
        if recurrence == "mamba2":
            o = mamba2(x, a, gates[0], gates[1], gates[2], own, drafts, rows, num_groups=heads.num_key_heads)
        else:
            o = gated_delta(x, a, b, gates[0], gates[1], own, drafts, rows, num_key_heads=heads.num_key_heads)
        results.append([o, own[1:]])
    return results[0], results[1]


def _convolve(
    fill: Callable[..., Tensor],
    rows: Rows,
    heads: DeltaHeads,
    width: int,
    max_draft: int,
    dtype: torch.dtype,
    *,
    has_bias: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the convolution computed and what its reference computed, for rows that update their lines."""
    num_rows, channels = rows.num_rows, heads.channels
    x = _projected(fill, num_rows * rows.max_length, heads).to(dtype)[:, :channels]
    weight, bias = fill(width, channels).to(dtype), fill(channels).to(dtype) if has_bias else None
    lines = fill(num_rows + 1, width - 1 + max_draft, channels).to(dtype)
    want_lines = lines.clone()
    y = causal_conv1d(x, weight, bias, lines, rows)
    return [y, lines], [causal_conv1d_reference(x, weight, bias, want_lines, rows), want_lines]


def _projected(fill: Callable[..., Tensor], num_tokens: int, heads: DeltaHeads) -> Tensor:
    """Make what the projection of a layer leaves: q, k, v, z, b and a side by side, `[T, *]`."""
    return fill(num_tokens, heads.channels + heads.value_channels + 2 * heads.num_value_heads)


def _compare_delta(
    fill: Callable[..., Tensor],
    rows: Rows,
    heads: DeltaHeads,
    width: int,
    max_draft: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yield the name of each family, what it computed and what its reference computed."""
    num_tokens = int(rows.query_start_loc[-1])
    channels, num_heads = heads.channels, heads.num_value_heads
    x = _projected(fill, num_tokens, heads).to(dtype)
    x, z, b, a = x.split((channels, heads.value_channels, num_heads, num_heads), dim=-1)
    weight = fill(width, channels).to(dtype)
    num_lines = max(4, rows.num_rows + 1)
    lines = fill(num_lines, width - 1 + max_draft, channels).to(dtype)
    want_lines = lines.clone()
    y = causal_conv1d(x, weight, None, lines, rows)
    qkv = causal_conv1d_reference(x, weight, None, want_lines, rows)
    yield "conv1d", [y, lines], [qkv, want_lines]

    A_log, dt_bias = fill(num_heads), fill(num_heads)
    state = fill(num_lines, num_heads, heads.value_dim, heads.key_dim).to(state_dtype)
    # Drafts as a VERIFY writes them: unit keys, updates, gates below 0.
    drafts = fill(num_lines, 2, max_draft, heads.record).mul_(heads.scale)
    drafts[..., -num_heads:].abs_().neg_()
    want_state, want_drafts = state.clone(), drafts.clone()
    o = gated_delta(qkv, a, b, A_log, dt_bias, state, drafts, rows, num_key_heads=heads.num_key_heads)
    want = gated_delta_reference(
        qkv, a, b, A_log, dt_bias, want_state, want_drafts, rows, num_key_heads=heads.num_key_heads
    )
    yield "gated_delta", [o, state, drafts], [want, want_state, want_drafts]

    z, scale = z.unflatten(-1, (num_heads, heads.value_dim)), fill(heads.value_dim)
    yield "norm", [gated_rms_norm(want, z, scale, 1e-6)], [gated_rms_norm_reference(want, z, scale, 1e-6)]


def _compare_mamba(
    fill: Callable[..., Tensor],
    rows: Rows,
    heads: DeltaHeads,
    width: int,
    max_draft: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    *,
    norm_groups: int,
    dt_limit: tuple[float, float],
    has_conv_bias: bool,
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yield what `_compare_delta` does, for the families of a Mamba2 layer."""
    num_tokens, num_lines = int(rows.query_start_loc[-1]), max(4, rows.num_rows + 1)
    channels, num_heads, groups = (
        heads.channels,
        heads.num_value_heads,
        heads.num_key_heads,
    )
    z, x, dt, _ = (
        _projected(fill, num_tokens, heads).to(dtype).split((heads.value_channels, channels, num_heads, num_heads), 1)
    )
    weight, bias = fill(width, channels).to(dtype), fill(channels).to(dtype) if has_conv_bias else None
    lines = fill(num_lines, width - 1 + max_draft, channels).to(dtype)
    want_lines = lines.clone()
    y = causal_conv1d(x, weight, bias, lines, rows)
    xBC = causal_conv1d_reference(x, weight, bias, want_lines, rows)
    yield "conv1d", [y, lines], [xBC, want_lines]

    # B and C of moderate length: products of 128 large numbers would hide what is added to them.
    xBC[:, heads.value_channels :] *= heads.scale**0.5
    weights = (fill(num_heads), fill(num_heads), fill(num_heads))
    state = fill(num_lines, num_heads, heads.value_dim, heads.key_dim).to(state_dtype)
    drafts = fill(num_lines, 2, max_draft, heads.record).mul_(heads.scale)
    drafts[..., -num_heads:].abs_().neg_()
    want_state, want_drafts = state.clone(), drafts.clone()
    sizes: dict[str, Any] = {"num_groups": groups, "dt_limit": dt_limit}
    y = mamba2(xBC, dt, *weights, state, drafts, rows, **sizes)
    want = mamba2_reference(xBC, dt, *weights, want_state, want_drafts, rows, **sizes)
    yield "mamba2", [y, state, drafts], [want, want_state, want_drafts]

    want, z = (part.flatten(1).unflatten(1, (norm_groups, -1)) for part in (want, z))
    scale = fill(norm_groups, heads.value_channels // norm_groups)
    got = gated_rms_norm(want, z, scale, 1e-6, gate_first=True)
    yield "norm", [got], [gated_rms_norm_reference(want, z, scale, 1e-6, gate_first=True)]


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value that was wanted in the same tensor (at least 1)."""
    worst = 0.0
    for computed, expected in zip(got, want, strict=True):
        scale = max(1.0, float(expected.float().abs().amax()))
        error = float((computed.float() - expected.float()).abs().amax()) / scale
        worst = max(worst, error if error == error else float("inf"))
    return worst
