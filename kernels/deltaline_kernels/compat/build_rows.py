"""Builds `Rows` on the device from the tensors that engines pass, in one launch and without the host."""

import torch
import triton
import triton.language as tl

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.rows import NUM_FIELDS, Rows

# Entries of the control tensor per program.
BLOCK = 256


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_rows", "length", "read_stride", "write_stride", "pad", "last_offset", "most_tokens"],
    do_not_specialize_on_alignment=["control", "starts", "read_lines", "write_lines", "history", "num_accepted"],
)
def _build(
    control,
    starts,
    read_lines,
    write_lines,
    history,
    num_accepted,
    num_rows,
    length,
    read_stride,
    write_stride,
    pad,
    last_offset,
    most_tokens,
    HAS_STARTS: tl.constexpr,
    HAS_READS: tl.constexpr,
    HAS_WRITES: tl.constexpr,
    HISTORY: tl.constexpr,
    SPECULATIVE: tl.constexpr,
    MOVES: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_rows
    if HAS_STARTS:
        begin = tl.load(starts + i, mask=i <= num_rows, other=0).to(tl.int64)
        end = tl.load(starts + i + 1, mask=inside, other=0).to(tl.int64)
    else:
        begin = i.to(tl.int64) * length
        end = begin + length
    count = end - begin
    read, write = i.to(tl.int64), i.to(tl.int64)
    if HAS_READS:
        read = tl.load(read_lines + i.to(tl.int64) * read_stride, mask=inside, other=-1).to(tl.int64)
    if HAS_WRITES:
        write = tl.load(write_lines + i.to(tl.int64) * write_stride, mask=inside, other=-1).to(tl.int64)
    # An empty row touches no line either, unless it moves: the accepted tokens of the step before stay where they are.
    kept = (write >= 0) & (write != pad)
    live = inside & ((count > 0) | MOVES) & (read >= 0) & (read != pad) & (kept | MOVES)
    committed, replayed = count, tl.zeros_like(count)
    if SPECULATIVE:
        # A row whose drafts do not fit its line would write to the next one.
        live = live & (count <= most_tokens)
        committed = tl.minimum(count, 1)
        replayed = tl.load(num_accepted + i, mask=inside, other=0).to(tl.int64) - 1
        replayed = tl.minimum(tl.maximum(replayed, 0), last_offset)
    if HISTORY == "some":
        has_history = tl.load(history + i, mask=inside, other=0) != 0
        read = tl.where(has_history, read, -1)
    elif HISTORY == "none":
        read = tl.full((BLOCK,), -1, tl.int64)
    row = control + i
    stored = i <= num_rows
    tl.store(row, begin.to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, tl.where(live, read + 1, -1).to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, tl.where(live & kept & KEEP, write + 1, -1).to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, committed.to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, replayed.to(tl.int32), mask=stored)
    # Neither halves nor positions.
    for _ in range(2):
        row += num_rows + 1
        tl.store(row, tl.zeros((BLOCK,), tl.int32), mask=stored)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "length",
        "read_stride",
        "read_column_stride",
        "last_column",
        "stride",
        "column_stride",
        "count_stride",
        "width",
        "pad",
    ],
    do_not_specialize_on_alignment=["control", "starts", "read_lines", "token_lines", "num_accepted"],
)
def _build_with_tokens(
    control,
    starts,
    read_lines,
    token_lines,
    num_accepted,
    num_rows,
    length,
    read_stride,
    read_column_stride,
    last_column,
    stride,
    column_stride,
    count_stride,
    width,
    pad,
    HAS_STARTS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_rows
    i_row = i.to(tl.int64)
    if HAS_STARTS:
        begin = tl.load(starts + i, mask=i <= num_rows, other=0).to(tl.int64)
        end = tl.load(starts + i + 1, mask=inside, other=0).to(tl.int64)
    else:
        begin = i_row * length
        end = begin + length
    count = end - begin
    column = tl.zeros_like(count)
    if HAS_COUNTS:
        column = tl.load(num_accepted + i_row * count_stride, mask=inside, other=1).to(tl.int64) - 1
        column = tl.minimum(tl.maximum(column, 0), last_column)
    p_read = read_lines + i_row * read_stride + column * read_column_stride
    read = tl.load(p_read, mask=inside, other=-1).to(tl.int64)
    # One with a token that has no line is skipped, where that is not to say that its state is not kept.
    live = inside & (count > 0) & (count <= width) & (read >= 0) & (read != pad)
    p_line = token_lines + i_row * stride
    if not MOVES:
        for t in range(0, width):
            line = tl.load(p_line + t * column_stride, mask=inside & (t < count), other=-1)
            live = live & ((t >= count) | ((line >= 0) & (line != pad)))
    stored = i <= num_rows
    row = control + i
    nothing = tl.zeros((BLOCK,), tl.int32)
    tl.store(row, begin.to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, tl.where(live, read + 1, -1).to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, nothing - 1, mask=stored)
    row += num_rows + 1
    tl.store(row, count.to(tl.int32), mask=stored)
    # Nothing replayed, no halves, no positions.
    for _ in range(3):
        row += num_rows + 1
        tl.store(row, nothing, mask=stored)
    for t in range(0, width):
        line = tl.load(p_line + t * column_stride, mask=live & (t < count), other=-1).to(tl.int64)
        row += num_rows + 1
        tl.store(row, tl.where((line >= 0) & (line != pad), line + 1, -1).to(tl.int32), mask=stored)


def build_rows(
    rows: EngineRows, num_tokens: int, device: torch.device, columns: int, width: int, *, keep: bool
) -> Rows:
    """Do what `place_rows` does, on a GPU."""
    if rows.token_lines is not None:
        return _build_tokens(rows, rows.token_lines, num_tokens, device)
    n = rows.num_rows
    control = torch.empty((NUM_FIELDS, n + 1), dtype=torch.int32, device=device)
    reads, writes = rows.read_line, rows.write_line
    some = isinstance(rows.history, torch.Tensor)
    _build[(triton.cdiv(n + 1, BLOCK),)](
        control,
        control if rows.starts is None else rows.starts,
        control if reads is None else reads,
        control if writes is None else writes,
        rows.history if some else control,
        control if rows.num_accepted is None else rows.num_accepted,
        n,
        rows.length,
        1 if reads is None else reads.stride(0),
        1 if writes is None else writes.stride(0),
        rows.pad,
        columns - width + 1,
        rows.most_tokens(columns, width) or 0,
        HAS_STARTS=rows.starts is not None,
        HAS_READS=reads is not None,
        HAS_WRITES=writes is not None,
        HISTORY="some" if some else "all" if rows.history else "none",
        SPECULATIVE=rows.num_accepted is not None,
        MOVES=rows.moves,
        KEEP=keep,
        BLOCK=BLOCK,
    )
    return Rows(control, 0, 1, num_tokens)


def _build_tokens(rows: EngineRows, token_lines: torch.Tensor, num_tokens: int, device: torch.device) -> Rows:
    """Return the rows, which have a line for each token; one that is longer than its table is skipped."""
    n, width = rows.num_rows, rows.most_states(num_tokens)
    reads, accepted = rows.read_line, rows.num_accepted
    assert reads is not None
    control = torch.empty((NUM_FIELDS + width, n + 1), dtype=torch.int32, device=device)
    _build_with_tokens[(triton.cdiv(n + 1, BLOCK),)](
        control,
        control if rows.starts is None else rows.starts,
        reads,
        token_lines,
        control if accepted is None else accepted,
        n,
        rows.length,
        *reads.stride(),
        reads.shape[1] - 1,
        *token_lines.stride(),
        1 if accepted is None else accepted.stride(0),
        width,
        rows.pad,
        HAS_STARTS=rows.starts is not None,
        HAS_COUNTS=accepted is not None,
        MOVES=rows.moves,
        BLOCK=BLOCK,
    )
    return Rows(control, n, max(width, 1), width, width)
