"""Causal convolution over packed rows on the CPU: vectorised PyTorch, tap by tap over blocks that fit in cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cohorts import Cohort, group_rows, put, take
from deltaline_kernels.rows import Rows

# Values per block: 256 tokens x 3072 channels was the fastest of 32..2048 tokens (2 cores, 1 MiB of L2 each).
BLOCK_VALUES = 256 * 3072


def causal_conv1d_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, y: Tensor, *, silu: bool
) -> None:
    """Write the rows' outputs to y `[T, D]`; mutates `lines`."""
    w = weight.float()
    b = None if bias is None else bias.float()
    cohorts, skipped = group_rows(rows)
    for begin, end in skipped:
        y[begin:end] = 0
    for cohort in cohorts:
        _convolve_cohort(x, w, b, lines, cohort, y, silu)


def _convolve_cohort(
    x: Tensor, w: Tensor, b: Tensor | None, lines: Tensor, cohort: Cohort, y: Tensor, silu: bool
) -> None:
    history, c = w.shape[0] - 1, cohort.committed
    tokens = cohort.tokens(x)  # (B, n, D)
    if cohort.reads:
        before = take(lines, cohort.read_lines)[:, cohort.replayed : cohort.replayed + history].to(x.dtype)
    else:
        before = torch.zeros((), dtype=x.dtype).expand(cohort.num_rows, history, x.shape[1])
    in_place = cohort.packed and y.dtype == torch.float32
    out = cohort.tokens(y) if in_place else torch.empty(tokens.shape, dtype=torch.float32)
    if c > history:
        # Only the first tokens see the line; those behind them need no copy.
        _convolve(torch.cat((before, tokens[:, :history]), dim=1), w, b, out[:, :history], silu)
        _convolve(tokens, w, b, out[:, history:], silu)
        kept = tokens[:, c - history :]
    else:
        full = torch.cat((before, tokens), dim=1)
        _convolve(full, w, b, out, silu)
        kept = full[:, c:]
    if not in_place:
        cohort.put_tokens(y, out)
    if cohort.writes:
        put(lines[:, : kept.shape[1]], cohort.write_lines, kept)


def _convolve(full: Tensor, w: Tensor, b: Tensor | None, out: Tensor, silu: bool) -> None:
    """Write act(b + sum_j w[j] full[:, t+j]) to out `[B, n, D]` fp32, block by block."""
    num_rows, n, channels = out.shape
    block = max(1, BLOCK_VALUES // max(1, num_rows * channels))
    for t in range(0, n, block):
        total = out[:, t : t + block]
        size = total.shape[1]
        torch.mul(full[:, t : t + size], w[0], out=total)
        for j in range(1, w.shape[0]):
            total.addcmul_(full[:, t + j : t + j + size].to(torch.float32), w[j])
        if b is not None:
            total.add_(b)
        if silu:
            F.silu(total, inplace=True)
