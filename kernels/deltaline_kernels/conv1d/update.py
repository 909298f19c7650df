"""Causal convolution of short rows in Triton: decode, verify, several tokens per row.

    full = cat(lines[read_line, r : r+S], x[row]),  S = W - 1
    y[t] = act(bias + sum_j w[j] full[t+j]);  lines[write_line, 0 : S+n-c] = full[c : S+n]

A program owns a few rows and a block of channels, has all their values in registers before it computes, and has no
branch. It reads the control values of `Rows`, or the index tensors that engines pass (FIELD), so that neither costs a
launch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.conv1d.prefill import convolve_token, line_offsets
from deltaline_kernels.rows import Rows

# The most tokens of a row, and how many of them a compiled variant takes.
MAX_TOKENS = 8
TOKEN_BUCKETS = (1, 4, MAX_TOKENS)
NUM_WARPS = 4
# Of so many rows a program takes several.
MANY_ROWS, SEVERAL = 128, 4


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_rows", "index_stride", "pad", "columns"],
    do_not_specialize_on_alignment=["starts", "read_lines", "write_lines", "committed_counts", "replayed_counts"],
)
def update_kernel(
    x,
    weight,
    bias,
    lines,
    y,
    starts,
    read_lines,
    write_lines,
    committed_counts,
    replayed_counts,
    line_stride,
    num_rows,
    index_stride,
    pad,
    columns,
    x_stride: tl.constexpr,
    num_channels: tl.constexpr,
    tap_stride: tl.constexpr,
    channel_stride: tl.constexpr,
    column_stride: tl.constexpr,
    line_channel_stride: tl.constexpr,
    W: tl.constexpr,
    LENGTH: tl.constexpr,
    FIELD: tl.constexpr,
    SPECULATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Convolve a few short rows for a block of channels; mutates their lines."""
    S: tl.constexpr = W - 1
    EXACT: tl.constexpr = y.dtype.element_ty == tl.float32
    # Rows on the first axis of the grid: the others end at 65,535.
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = o_d < num_channels
    o_line = line_offsets(o_d, line_channel_stride)
    # A load waits for nothing but the loads that tell its address, and the first arithmetic on values stands behind the
    # last load: a cold call takes two latencies of memory, not four.
    rows = ()
    for r in tl.static_range(ROWS):
        i_row = tl.program_id(0) * ROWS + r
        inside = (i_row < num_rows) | (ROWS == 1)
        # LENGTH: rows of so many tokens; 0: the rows' offsets tell.
        if LENGTH > 0:
            begin = (i_row * LENGTH).to(tl.int64)
            n = tl.where(inside, LENGTH, 0)
        else:
            begin = tl.load(starts + i_row, mask=inside, other=0).to(tl.int64)
            n = (tl.load(starts + i_row + 1, mask=inside, other=0).to(tl.int64) - begin).to(tl.int32)
        read = tl.load(read_lines + i_row.to(tl.int64) * index_stride, mask=inside, other=-1).to(tl.int64)
        write = tl.load(write_lines + i_row.to(tl.int64) * index_stride, mask=inside, other=-1).to(tl.int64)
        if FIELD:
            # Every line is an ordinary one; an empty row touches none, nor does one that is longer than promised.
            live = (n > 0) & (n <= TOKENS) & (read >= 0) & (read != pad) & (write >= 0) & (write != pad)
            committed, replayed = n, tl.full((), 0, tl.int32)
            if SPECULATIVE:
                # A row whose drafts do not fit its line would write to the next one.
                live = live & (n <= columns - S + 1)
                # The first token of a row is always accepted, and counts itself among the accepted.
                committed = tl.minimum(n, 1)
                replayed = tl.load(replayed_counts + i_row, mask=inside, other=0).to(tl.int32) - 1
                replayed = tl.minimum(tl.maximum(replayed, 0), columns - S)
            has_history, kept = live, live
        else:
            live = (read != -1) | (write != -1)
            has_history, kept = read > 0, write > 0
            committed = tl.load(committed_counts + i_row, mask=inside, other=0)
            replayed = tl.load(replayed_counts + i_row, mask=inside, other=0)
        p_old = lines + read * line_stride + replayed.to(tl.int64) * column_stride
        # Token t of `full` goes to column t - committed.
        p_new = lines + write * line_stride - committed.to(tl.int64) * column_stride
        rows = rows + ((begin, n, live, has_history, p_old, kept, committed, p_new),)

    weights = ()
    for j in tl.static_range(W):
        w = tl.load(weight + j * tap_stride + o_d * channel_stride, mask=in_d, other=0.0)
        weights = weights + (w,)
    if HAS_BIAS:
        b = tl.load(bias + o_d, mask=in_d, other=0.0)
    else:
        b = tl.zeros((BLOCK_D,), dtype=tl.float32)

    fulls = ()
    for r in tl.static_range(ROWS):
        begin, n, _, has_history, p_old, _, _, _ = rows[r]
        p_x = x + begin * x_stride
        full = ()
        for j in tl.static_range(S):
            full = full + (tl.load(p_old + j * column_stride + o_line, mask=in_d & has_history, other=0.0),)
        for j in tl.static_range(TOKENS):
            token = tl.load(p_x + j * x_stride + o_d, mask=in_d & (j < n), other=0.0)
            full = full + (token.to(lines.dtype.element_ty),)
        fulls = fulls + (full,)
    # Other threads than those that store a value may have loaded it.
    tl.debug_barrier()

    for r in tl.static_range(ROWS):
        begin, n, live, _, _, kept, committed, p_new = rows[r]
        full = fulls[r]
        for j in tl.static_range(S + TOKENS):
            stored = kept & (j >= committed) & (j < S + n)
            tl.store(p_new + j * column_stride + o_line, full[j], mask=in_d & stored)
        p_y = y + begin * num_channels
        for j in tl.static_range(TOKENS):
            total = convolve_token(full, j, weights, b, W, SILU, EXACT)
            total = tl.where(live, total, 0.0).to(y.dtype.element_ty)
            tl.store(p_y + j * num_channels + o_d, total, mask=in_d & (j < n))


@dataclass(frozen=True)
class Indices:
    """The rows of an update as engines describe them, all on the device of the tensors.

    Args:
        read_line, write_line: `[N]` integers of one stride, the line of each row; below 0 or equal to `pad` skips it.
        length: tokens of each row; where `query_start_loc` tells, the most of any row. At most MAX_TOKENS. A row with
            more tokens than the bucket of `length` is skipped, and so is a speculative one that its line can't keep.
        query_start_loc: `[N+1]` integers, or None.
        num_accepted: `[N]` integers, accepted tokens of the previous step, its first included, or None where nothing is
            speculative. Values outside 1..columns-W+2 count as the nearest of them.
        pad: the index of padding rows besides those below 0.
    """

    read_line: Tensor
    write_line: Tensor
    length: int
    query_start_loc: Tensor | None
    num_accepted: Tensor | None
    pad: int


def launch_update(inputs: ConvInputs, rows: Rows | Indices, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, D]`, contiguous; mutates the lines. Rows have at most MAX_TOKENS tokens."""
    x, weight, bias, lines = inputs.x, inputs.weight, inputs.bias, inputs.lines
    width, channels = weight.shape
    if isinstance(rows, Rows):
        control = rows.control
        pointers = (control, control[1], control[2], control[3], control[4])
        num_rows, most, index_stride, pad = rows.num_rows, rows.max_length, 1, -1
        dense, speculative = False, False
    else:
        starts, accepted, unused = rows.query_start_loc, rows.num_accepted, rows.read_line
        dense, speculative = starts is None, accepted is not None
        pointers = (
            unused if starts is None else starts,
            rows.read_line,
            rows.write_line,
            unused,
            unused if accepted is None else accepted,
        )
        num_rows, most, index_stride, pad = rows.read_line.shape[0], rows.length, rows.read_line.stride(0), rows.pad
    if num_rows == 0 or channels == 0:
        return
    tokens = most if dense else next(bucket for bucket in TOKEN_BUCKETS if bucket >= most)
    # The fastest of 15 choices on an H200 for 1 to 1,024 rows (docs/log.md). Threads have fewer channels where rows are
    # few: less to load before the first can be stored; more so where each weight is a load of its own.
    group = SEVERAL if num_rows >= MANY_ROWS else 1
    block = 256 if group == 1 and weight.stride(1) != 1 else 1024 if group > 1 and tokens == 1 else 512
    update_kernel[(triton.cdiv(num_rows, group), triton.cdiv(channels, block))](
        x,
        weight,
        x if bias is None else bias,
        lines,
        y,
        *pointers,
        lines.stride(0),
        num_rows,
        index_stride,
        pad,
        lines.shape[1],
        x.stride(0),
        channels,
        *weight.stride(),
        *lines.stride()[1:],
        W=width,
        LENGTH=most if dense else 0,
        FIELD=isinstance(rows, Indices),
        SPECULATIVE=speculative,
        HAS_BIAS=bias is not None,
        SILU=inputs.silu,
        ROWS=group,
        TOKENS=tokens,
        BLOCK_D=block,
        num_warps=NUM_WARPS,
        num_stages=1,
    )
