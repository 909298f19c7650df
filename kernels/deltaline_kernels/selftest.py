"""Compares every kernel family with its reference on small inputs, on the device that is to serve.

Wrong code from an assembler shows here before it shows in an answer. Knows nothing of models, allocates its tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels.conv1d import causal_conv1d, causal_conv1d_reference
from deltaline_kernels.gated_delta import gated_delta, gated_delta_reference
from deltaline_kernels.norm import gated_rms_norm, gated_rms_norm_reference
from deltaline_kernels.rows import Rows

# Largest difference, relative to the largest value of the reference (at least 1).
LIMITS = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 8e-3}

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, MAX_DRAFT = 2, 4, 64, 64, 4, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
RECORD = KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM + 2 * VALUE_HEADS


@dataclass(frozen=True)
class Check:
    """One comparison: its relative error and the limit that it must keep."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def run_selftest(device: torch.device | str, dtype: torch.dtype = torch.float32) -> list[Check]:
    """Run every family on `device` with inputs of `dtype`; wait for the device.

    Returns:
        One Check for each family and kind of input. A NaN counts as an infinite error.

    Raises:
        KeyError: `dtype` is not fp32, bf16 or fp16.
    """
    limit = LIMITS[dtype]
    generator = torch.Generator().manual_seed(0)
    fills: dict[str, Callable[..., Tensor]] = {
        "random": lambda *shape: torch.randn(*shape, generator=generator),
        "integers": lambda *shape: torch.randint(-2, 3, shape, generator=generator).float(),
        "ones": lambda *shape: torch.ones(*shape),
    }
    checks = []
    for kind, fill in fills.items():
        for batch, rows in _batches(device).items():
            for name, got, want in _compare(fill, rows, torch.device(device), dtype):
                checks.append(Check(f"{name}, {batch}, {kind}", _error(got, want), limit))
    return checks


def _batches(device: torch.device | str) -> dict[str, Rows]:
    """Rows of every kind; the long one has more than 128 tokens."""
    ones, zeros = [1, 1, 1], [0, 0, 0]
    return {
        "decode": Rows.build(ones, [1, 2, 0], [1, 2, 3], ones, zeros, zeros, max_short=MAX_DRAFT, device=device),
        "verify": Rows.build([4, 3], [1, 2], [1, 3], [0, 0], [2, 4], [0, 1], max_short=MAX_DRAFT, device=device),
        "prefill": Rows.build([130, 37], [0, 1], [2, 3], [130, 37], [0, 3], [0, 0], max_short=MAX_DRAFT, device=device),
    }


def _compare(
    fill: Callable[..., Tensor], rows: Rows, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yield the name of each family, what it computed and what its reference computed."""
    num_tokens = int(rows.query_start_loc[-1])
    x = fill(num_tokens, CHANNELS).to(device, dtype)
    weight, bias = fill(WIDTH, CHANNELS).to(device), fill(CHANNELS).to(device)
    lines = fill(4, WIDTH - 1 + MAX_DRAFT, CHANNELS).to(device, dtype)
    want_lines = lines.clone()
    y = causal_conv1d(x, weight, bias, lines, rows)
    yield "conv1d", [y, lines], [causal_conv1d_reference(x, weight, bias, want_lines, rows), want_lines]

    a, b = fill(num_tokens, VALUE_HEADS).to(device, dtype), fill(num_tokens, VALUE_HEADS).to(device, dtype)
    A_log, dt_bias = fill(VALUE_HEADS).to(device), fill(VALUE_HEADS).to(device)
    state = fill(4, VALUE_HEADS, VALUE_DIM, KEY_DIM).to(device)
    # Drafts as a VERIFY writes them: unit keys, gates below 0, strengths in 0..1.
    drafts = fill(4, 2, MAX_DRAFT, RECORD).mul_(KEY_DIM**-0.5).to(device)
    drafts[..., -2 * VALUE_HEADS :].abs_()
    drafts[..., -2 * VALUE_HEADS : -VALUE_HEADS].neg_()
    want_state, want_drafts = state.clone(), drafts.clone()
    o = gated_delta(x, a, b, A_log, dt_bias, state, drafts, rows, num_key_heads=KEY_HEADS)
    want = gated_delta_reference(x, a, b, A_log, dt_bias, want_state, want_drafts, rows, num_key_heads=KEY_HEADS)
    yield "gated_delta", [o, state, drafts], [want, want_state, want_drafts]

    z, scale = fill(num_tokens, VALUE_HEADS, VALUE_DIM).to(device, dtype), fill(VALUE_DIM).to(device)
    yield "norm", [gated_rms_norm(want, z, scale, 1e-6)], [gated_rms_norm_reference(want, z, scale, 1e-6)]


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value that was wanted in the same tensor (at least 1)."""
    worst = 0.0
    for computed, expected in zip(got, want, strict=True):
        scale = max(1.0, float(expected.float().abs().amax()))
        error = float((computed.float() - expected.float()).abs().amax()) / scale
        worst = max(worst, error if error == error else float("inf"))
    return worst
