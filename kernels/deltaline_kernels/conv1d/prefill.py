"""Causal convolution of rows of any length in Triton.

    full = cat(lines[read_line, r : r+S], x[row]),  S = W - 1
    y[t] = act(bias + sum_j w[j] full[t+j]);  lines[write_line, 0 : S+n-c] = full[c : S+n]

A program owns a piece of the packed tokens, whatever rows lie in it, and a block of channels. It walks through its rows
with the taps in registers, so that each value is loaded once, and loads the next tokens while it computes. No table of
programs is needed: each finds its first row in query_start_loc.

A row's first S tokens belong to the piece in which its first token lies, and so do its lines: no other program touches
them, and a row may read and write the same line.
"""

from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.device.activation import silu
from deltaline_kernels.device.prefetch import LINE_BYTES, prefetch
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint
from deltaline_kernels.rows import Rows

# Tokens and channels of a program, and tokens loaded ahead: the fastest of forty choices on an H200 (docs/log.md).
BLOCK_TOKENS = 64
BLOCK_CHANNELS = 128
AHEAD = 8
# Tokens asked for before the rows are known: with 32 it is no gain, with 64 a loss.
ASKED = 16
NUM_WARPS = 1
ROWS_AT_ONCE = tl.constexpr(128)


@triton.jit
def convolve_token(full, j: tl.constexpr, weights, b, W: tl.constexpr, SILU: tl.constexpr, EXACT: tl.constexpr):
    """Return act(b + sum_i weights[i] full[j + i]) in fp32, the oldest tap first."""
    total = b.to(tl.float32)
    for i in tl.static_range(W):
        total += full[j + i].to(tl.float32) * weights[i].to(tl.float32)
    if SILU:
        total = silu(total, EXACT)
    return total


@triton.jit
def line_offsets(o_d, line_channel_stride: tl.constexpr):
    """Return where channels are in a column of a line."""
    if line_channel_stride == 1:
        return o_d
    else:
        return o_d.to(tl.int64) * line_channel_stride


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "num_rows", "line_shift", "num_tokens"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def prefill_kernel(
    x,
    weight,
    bias,
    lines,
    q,
    k,
    v,
    control,
    control_stride,
    line_stride,
    num_rows,
    line_shift,
    waypoints,
    num_tokens,
    x_stride: tl.constexpr,
    num_channels: tl.constexpr,
    tap_stride: tl.constexpr,
    channel_stride: tl.constexpr,
    column_stride: tl.constexpr,
    line_channel_stride: tl.constexpr,
    end_q: tl.constexpr,
    end_k: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
    ASKED: tl.constexpr,
):
    """Convolve the tokens of a piece for a block of channels; mutates the lines of rows that begin there."""
    S: tl.constexpr = W - 1
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    dtype: tl.constexpr = lines.dtype.element_ty
    # A block of channels never crosses from one output to the next.
    blocks_q: tl.constexpr = (end_q + BLOCK_D - 1) // BLOCK_D
    blocks_k: tl.constexpr = (end_k - end_q + BLOCK_D - 1) // BLOCK_D
    num_blocks: tl.constexpr = blocks_q + blocks_k + (num_channels - end_k + BLOCK_D - 1) // BLOCK_D
    i_block = tl.program_id(0) % num_blocks
    y = q
    if end_q == num_channels:
        first_d: tl.constexpr = 0
        y_stride: tl.constexpr = num_channels
    else:
        first_d, y_stride = 0, end_q
        if i_block >= blocks_q:
            y, first_d, y_stride, i_block = k, end_q, end_k - end_q, i_block - blocks_q
            if i_block >= blocks_k:
                y, first_d, y_stride, i_block = v, end_k, num_channels - end_k, i_block - blocks_k
    o_part = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = o_part < y_stride
    o_d = first_d + o_part
    o_line = line_offsets(o_d, line_channel_stride)
    begin_piece = (tl.program_id(0) // num_blocks).to(tl.int64) * BLOCK_T
    if ASKED > 0:
        LINE: tl.constexpr = LINE_BYTES // (x.dtype.element_ty.primitive_bitwidth // 8)
        # The first tokens of the piece, whichever rows they are of: to find that out takes as long as to read them.
        if begin_piece < num_tokens:
            o_t = tl.minimum(begin_piece + tl.arange(0, ASKED), num_tokens - 1)
            o_first = tl.minimum(first_d + i_block * BLOCK_D + tl.arange(0, BLOCK_D // LINE) * LINE, num_channels - 1)
            prefetch(x + o_t[:, None] * x_stride + o_first[None, :])
    weights = ()
    for j in tl.static_range(W):
        w = tl.load(weight + j * tap_stride + o_d * channel_stride, mask=in_d, other=0.0)
        weights = weights + (w.to(tl.float32),)
    if HAS_BIAS:
        b = tl.load(bias + o_d, mask=in_d, other=0.0).to(tl.float32)
    else:
        b = tl.zeros((BLOCK_D,), dtype=tl.float32)

    end_piece = begin_piece + BLOCK_T
    # How many rows begin before the piece: by counting, since a bisection waits for one load after the other.
    num_before = 0
    o_row = tl.arange(0, ROWS_AT_ONCE)
    for i in range(0, num_rows, ROWS_AT_ONCE):
        starts = tl.load(control + i + o_row, mask=i + o_row < num_rows, other=0x7FFFFFFF)
        num_before += tl.sum((starts < begin_piece).to(tl.int32), 0)
    i_row = tl.maximum(num_before - 1, 0)
    begin = tl.load(control + i_row).to(tl.int64)
    while (i_row < num_rows) & (begin < end_piece):
        end = tl.load(control + i_row + 1).to(tl.int64)
        head = begin >= begin_piece
        first = tl.where(head, begin, tl.maximum(begin_piece, begin + S))
        last = tl.minimum(end, tl.maximum(end_piece, begin + S))
        # The head of an empty row still has a line to shift.
        if head | (first < last):
            count = (last - first).to(tl.int32)
            p_x = x + first * x_stride
            p_y = y + first * y_stride
            read = tl.load(control + control_stride + i_row).to(tl.int64)
            write = tl.load(control + 2 * control_stride + i_row).to(tl.int64)
            if (read != -1) | (write != -1):
                p_old = lines + (read - line_shift) * line_stride
                if head:
                    p_old += tl.load(control + 4 * control_stride + i_row).to(tl.int64) * column_stride
                full = ()
                for j in tl.static_range(S):
                    if head:
                        tap = tl.load(p_old + j * column_stride + o_line, mask=in_d & (read > 0), other=0.0)
                    else:
                        tap = tl.load(p_x + (j - S) * x_stride + o_d, mask=in_d, other=0.0).to(dtype)
                    full = full + (tap.to(tl.float32),)
                ahead = ()
                for j in tl.static_range(AHEAD):
                    token = tl.load(p_x + j * x_stride + o_d, mask=in_d & (j < count), other=0.0)
                    ahead = ahead + (token.to(dtype),)
                for t in range(0, count, AHEAD):
                    for j in tl.static_range(AHEAD):
                        full = full + (ahead[j].to(tl.float32),)
                    p_x += AHEAD * x_stride
                    p_from = p_x + o_d
                    p_to = p_y + o_part
                    ahead = ()
                    for j in tl.static_range(AHEAD):
                        token = tl.load(p_from + j * x_stride, mask=in_d & (t + AHEAD + j < count), other=0.0)
                        ahead = ahead + (token.to(dtype),)
                    for j in tl.static_range(AHEAD):
                        total = convolve_token(full, j, weights, b, W, SILU, EXACT)
                        tl.store(p_to + j * y_stride, total.to(y.dtype.element_ty), mask=in_d & (t + j < count))
                    p_y += AHEAD * y_stride
                    full = full[AHEAD:]
                if head & (write > 0):
                    committed = tl.load(control + 3 * control_stride + i_row).to(tl.int64)
                    p_new = lines + (write - line_shift) * line_stride
                    # In ascending order: in place, each column is read before it is overwritten.
                    for c in range(committed, S + end - begin):
                        old = tl.load(p_old + c * column_stride + o_line, mask=in_d & (c < S) & (read > 0), other=0.0)
                        new = tl.load(x + (begin + c - S) * x_stride + o_d, mask=in_d & (c >= S), other=0.0)
                        # Other threads than those that store a value may have loaded it.
                        tl.debug_barrier()
                        kept = tl.where(c < S, old, new.to(dtype))
                        tl.store(p_new + (c - committed) * column_stride + o_line, kept, mask=in_d)
                if waypoints is not None:
                    # Of a row's tokens in a piece at most one is the last before a place where it may have a waypoint.
                    done = (last - begin) // TOKENS * TOKENS
                    if begin + done > first:
                        line = find_waypoint(waypoints, begin, end - begin, i_row, done)
                        p_kept = lines + (line - line_shift) * line_stride
                        for j in tl.static_range(S):
                            p_token = x + (begin + done + j - S) * x_stride + o_d
                            token = tl.load(p_token, mask=in_d & (line > 0), other=0.0)
                            tl.store(p_kept + j * column_stride + o_line, token.to(dtype), mask=in_d & (line > 0))
            else:
                for _ in range(0, count):
                    tl.store(p_y + o_part, tl.zeros((BLOCK_D,), dtype=y.dtype.element_ty), mask=in_d)
                    p_y += y_stride
        begin = end
        i_row += 1


def launch_prefill(inputs: ConvInputs, rows: Rows, outputs: tuple[Tensor, ...]) -> None:
    """Write the rows' outputs to `outputs`, one to three contiguous tensors that share the channels; mutates the lines.

    Strides and sizes of x and weight, and those of a line, are constants of the compiled kernel.
    """
    x, weight, bias, lines = inputs.x, inputs.weight, inputs.bias, inputs.lines
    width, channels = weight.shape
    if rows.num_rows == 0 or channels == 0:
        return
    sizes = [output.shape[1] for output in outputs]
    ends = (*accumulate(sizes), channels, channels)
    blocks = sum(triton.cdiv(size, BLOCK_CHANNELS) for size in sizes)
    # One piece more than the tokens fill, for empty rows behind the last token.
    pieces = x.shape[0] // BLOCK_TOKENS + 1
    q, k, v = (*outputs, outputs[-1], outputs[-1])[:3]
    prefill_kernel[(blocks * pieces,)](
        x,
        weight,
        x if bias is None else bias,
        lines,
        q,
        k,
        v,
        rows.control,
        rows.control.stride(0),
        lines.stride(0),
        rows.num_rows,
        inputs.line_shift,
        rows.waypoints,
        x.shape[0],
        x.stride(0),
        channels,
        *weight.stride(),
        *lines.stride()[1:],
        ends[0],
        ends[1],
        W=width,
        HAS_BIAS=bias is not None,
        SILU=inputs.silu,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_D=BLOCK_CHANNELS,
        AHEAD=AHEAD,
        ASKED=0 if x.device.type == "cpu" else ASKED,
        num_warps=NUM_WARPS,
        num_stages=1,
    )
