"""States in the slots of a pool: which one a row begins with, and where the state after each of its tokens goes."""

from functools import partial

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.compat.recurrence import AnyInputs, Operation, advance
from deltaline_kernels.compat.rows import check_lines, check_offsets


def advance_table(
    run: Operation[AnyInputs],
    inputs: AnyInputs,
    pool: Tensor,
    rows: EngineRows,
    table: Tensor,
    accepted: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Run rows whose state after token t goes to slot `table[i, t]`; return o `[T, HV, V]`, zero for skipped rows.

    A launch per token, each of which reads and writes a state of every row. Does not wait for the device.

    Args:
        pool: `[slots, HV, V, K]`. Mutated: the slots of the rows' tokens.
        rows: how many, and their offsets or their length.
        table: `[N, columns]`. A row of more than `columns` tokens is skipped, and so is one that begins with a negative
            slot or has one for a token.
        accepted: `[N]` or None: row i begins with slot `table[i, accepted[i] - 1]`, bounded to the table, or the first.
        dtype: of o; None: that of the tokens.
    """
    num_rows, columns = table.shape
    num_tokens, device = inputs.num_tokens, inputs.device
    most = rows.length if rows.starts is None else min(columns, num_tokens)
    if num_rows == 0 or most == 0:
        return inputs.empty_output(dtype)
    t = torch.arange(most, device=device)
    first, targets = table[:, :1], table[:, :most]
    if accepted is not None:
        first = table.gather(1, (accepted.to(torch.int64) - 1).clamp(0, columns - 1)[:, None])
    if rows.starts is None:
        idle = (first < 0) | (targets < 0).any(1, keepdim=True)
    else:
        starts = rows.starts[: num_rows + 1].to(torch.int64)
        lengths = starts.diff()[:, None]
        missing = ((targets < 0) & (t < lengths)).any(1, keepdim=True)
        idle = (first < 0) | (lengths > columns) | missing | (t >= lengths)
        index = (starts[:-1, None] + t).clamp(0, num_tokens - 1).flatten()
        inputs = inputs.with_tokens(lambda x: x.index_select(0, index))
    reads = torch.cat((first, targets[:, :-1]), dim=1).masked_fill(idle, -1)
    outputs = []
    for i in range(most):
        one = EngineRows(num_rows, 1, 1, None, reads[:, i], targets[:, i], -1, True, None)
        column = inputs.with_tokens(partial(_column, i, most))
        outputs.append(advance(run, column, pool, one, o=column.empty_output(dtype)))
    o = torch.stack(outputs, dim=1)
    if rows.starts is None:
        return o.flatten(0, 1)
    token = torch.arange(num_tokens, device=device)
    row = torch.searchsorted(starts[1:], token, right=True).clamp(max=num_rows - 1)
    return o[row, (token - starts[row]).clamp(0, most - 1)]


def _column(t: int, length: int, x: Tensor) -> Tensor:
    """Return token t of each of the rows of `length` tokens."""
    token: Tensor = x.unflatten(0, (-1, length))[:, t]
    return token


def check_contents(
    rows: EngineRows,
    num_tokens: int,
    name: str = "",
    slots: Tensor | None = None,
    num_slots: int = 0,
    accepted: Tensor | None = None,
) -> None:
    """Check what the tensors say; waits for the device. `name` is that of `slots`, `[N]` or a table `[N, columns]`.

    Raises:
        ValueError: offsets that fall or leave the tokens, a row longer than its table, a slot out of range, or one that
            a row writes and another one uses. What is said of rows that are empty or skipped is not checked.
    """
    check_offsets(rows, num_tokens, "cu_seqlens")
    if slots is None:
        return
    n = rows.num_rows
    starts = [i * rows.length for i in range(n + 1)] if rows.starts is None else rows.starts.tolist()
    table = slots.tolist() if slots.ndim == 2 else [[slot] for slot in slots.tolist()]
    counts = [1] * n if accepted is None else accepted.tolist()
    used = []
    for i in range(n):
        length = starts[i + 1] - starts[i]
        if length == 0:
            continue
        if slots.ndim == 2 and length > len(table[i]):
            raise ValueError(f"cu_seqlens: expected rows of at most {len(table[i])} tokens, got {length} in row {i}")
        begin = table[i][min(max(counts[i] - 1, 0), len(table[i]) - 1)]
        targets = table[i][:length]
        if min(begin, *targets) >= 0:
            used.append((begin, targets))
    check_lines(name, "slot", used, num_slots)
