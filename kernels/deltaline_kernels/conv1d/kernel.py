"""Causal convolution over packed rows in Triton: one kernel for prefill and for update.

    full = cat(lines[read_line, r : r+S], x[row]),  S = W - 1
    y[t] = act(bias + sum_j w[j] full[t+j]);  lines[write_line, 0 : S+n-c] = full[c : S+n]

A program computes a block of tokens x channels of one row; the one with the row's first tokens is the only one that
touches lines. Does not know which rows decode, verify or prefill: counts say all.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.rows import Rows

BLOCK_CHANNELS = 128
LONG_BLOCK_TOKENS = 16


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride", "token_blocks"], do_not_specialize_on_alignment=["control"])
def _causal_conv1d(
    x,
    weight,
    bias,
    lines,
    y,
    control,
    x_stride,
    control_stride,
    line_columns,
    num_channels,
    token_blocks,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64) // token_blocks
    i_block = tl.program_id(0).to(tl.int64) % token_blocks
    begin = tl.load(control + i_row).to(tl.int64)
    n = tl.load(control + i_row + 1).to(tl.int64) - begin
    read = tl.load(control + control_stride + i_row).to(tl.int64)
    write = tl.load(control + 2 * control_stride + i_row).to(tl.int64)
    committed = tl.load(control + 3 * control_stride + i_row).to(tl.int64)
    replayed = tl.load(control + 4 * control_stride + i_row).to(tl.int64)
    # The first block of an empty row still has a line to shift.
    if (i_block == 0) | (i_block * BLOCK_T < n):
        live = (read != -1) | (write != -1)
        o_d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_d = o_d < num_channels
        o_t = i_block * BLOCK_T + tl.arange(0, BLOCK_T)
        in_t = o_t < n
        p_old = lines + (read * line_columns + replayed) * num_channels
        p_x = x + begin * x_stride

        total = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + o_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(W):
            # Token t + j of `full` is column t + j of the history, or token t + j - S of the row.
            o_h = o_t + j
            o_x = o_h - (W - 1)
            in_x = in_t & (o_x >= 0) & live
            in_h = in_t & (o_x < 0) & (read > 0)
            b_x = tl.load(p_x + o_x[:, None] * x_stride + o_d[None, :], mask=in_x[:, None] & in_d[None, :], other=0.0)
            b_h = tl.load(
                p_old + o_h[:, None] * num_channels + o_d[None, :], mask=in_h[:, None] & in_d[None, :], other=0.0
            )
            b_w = tl.load(weight + j * num_channels + o_d, mask=in_d, other=0.0).to(tl.float32)
            total += (b_x.to(tl.float32) + b_h.to(tl.float32)) * b_w[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        total = tl.where(live, total, 0.0)
        p_y = y + (begin + o_t)[:, None] * num_channels + o_d[None, :]
        tl.store(p_y, total.to(y.dtype.element_ty), mask=in_t[:, None] & in_d[None, :])

        if (i_block == 0) & (write > 0):
            o_c = tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
            o_kept = committed + o_c
            o_new = o_kept - (W - 1)
            kept = o_c < W - 1 + n - committed
            from_x = kept & (o_new >= 0)
            from_h = kept & (o_new < 0) & (read > 0)
            b_new = tl.load(
                p_x + o_new[:, None] * x_stride + o_d[None, :], mask=from_x[:, None] & in_d[None, :], other=0.0
            )
            b_old = tl.load(
                p_old + o_kept[:, None] * num_channels + o_d[None, :], mask=from_h[:, None] & in_d[None, :], other=0.0
            )
            b_kept = b_new + b_old
            # Threads store elements that other threads have loaded: all loads of the old line come first.
            tl.debug_barrier()
            p_new = lines + write * line_columns * num_channels + o_c[:, None] * num_channels + o_d[None, :]
            tl.store(p_new, b_kept, mask=kept[:, None] & in_d[None, :])


def causal_conv1d_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor, rows: Rows, y: Tensor, *, silu: bool
) -> None:
    """Write the rows' outputs to y `[T, D]`; mutates `lines`. Arguments are validated by `causal_conv1d`."""
    short, long = rows.short(), rows.long()
    _launch(x, weight, bias, lines, short, y, silu, triton.next_power_of_2(short.max_short), short.max_short)
    _launch(x, weight, bias, lines, long, y, silu, LONG_BLOCK_TOKENS, 0)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lines: Tensor,
    rows: Rows,
    y: Tensor,
    silu: bool,
    block_tokens: int,
    max_drafts: int,
) -> None:
    """Launch over `rows`, which keep at most `max_drafts` uncommitted tokens each."""
    width, channels = weight.shape
    if rows.num_rows == 0 or channels == 0:
        return
    token_blocks = max(1, triton.cdiv(rows.max_length, block_tokens))
    grid = (rows.num_rows * token_blocks, triton.cdiv(channels, BLOCK_CHANNELS))
    _causal_conv1d[grid](
        x,
        weight,
        x if bias is None else bias,
        lines,
        y,
        rows.control,
        x.stride(0),
        rows.control.stride(0),
        lines.shape[1],
        channels,
        token_blocks,
        W=width,
        HAS_BIAS=bias is not None,
        SILU=silu,
        BLOCK_T=block_tokens,
        BLOCK_COLUMNS=triton.next_power_of_2(width - 1 + max_drafts),
        BLOCK_D=BLOCK_CHANNELS,
        num_warps=4,
        num_stages=1,
    )
