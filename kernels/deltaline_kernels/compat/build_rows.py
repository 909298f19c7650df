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
    HAS_INDICES: tl.constexpr,
    HISTORY: tl.constexpr,
    SPECULATIVE: tl.constexpr,
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
    if HAS_INDICES:
        read = tl.load(read_lines + i.to(tl.int64) * read_stride, mask=inside, other=-1).to(tl.int64)
        write = tl.load(write_lines + i.to(tl.int64) * write_stride, mask=inside, other=-1).to(tl.int64)
    else:
        read, write = i.to(tl.int64), i.to(tl.int64)
    # An empty row touches no line either: the accepted tokens of the step before stay where they are.
    live = inside & (count > 0) & (read >= 0) & (write >= 0) & (read != pad) & (write != pad)
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
    tl.store(row, tl.where(live & KEEP, write + 1, -1).to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, committed.to(tl.int32), mask=stored)
    row += num_rows + 1
    tl.store(row, replayed.to(tl.int32), mask=stored)
    # Neither halves nor positions.
    for _ in range(2):
        row += num_rows + 1
        tl.store(row, tl.zeros((BLOCK,), tl.int32), mask=stored)


def build_rows(
    rows: EngineRows, num_tokens: int, device: torch.device, columns: int, width: int, *, keep: bool
) -> Rows:
    """Do what `place_rows` does, on a GPU."""
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
        HAS_INDICES=reads is not None,
        HISTORY="some" if some else "all" if rows.history else "none",
        SPECULATIVE=rows.num_accepted is not None,
        KEEP=keep,
        BLOCK=BLOCK,
    )
    return Rows(control, 0, 1, num_tokens)
