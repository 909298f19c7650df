"""The engines' causal convolution on the CPU: the lines in use are copied to a pool of their own and back.

Each row has a pool line to itself, so that all lines are read before any is written. Knows no devices.
"""

import torch
from torch import Tensor

from deltaline_kernels.compat.rows import EngineRows, HostRow, check_lengths, check_offsets, read_back
from deltaline_kernels.conv1d.cpu import causal_conv1d_cpu
from deltaline_kernels.rows import NUM_FIELDS, Rows


def convolve_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, lines: Tensor | None, rows: EngineRows, y: Tensor, *, silu: bool
) -> None:
    """Write the rows' outputs to y `[T, D]`, which may be x `[T, D]`; mutates `lines` `[L, columns, D]`.

    Raises:
        ValueError: offsets that fall or leave the tokens, a row longer than the bound or than its line can keep.
    """
    width = weight.shape[0]
    history = width - 1
    with torch.no_grad():
        dtype = x.dtype if lines is None else lines.dtype
        x = x.to(dtype, copy=y.data_ptr() == x.data_ptr())
        columns = history if lines is None else lines.shape[1]
        check_offsets(rows, x.shape[0])
        found = read_back(rows, columns, width)
        check_lengths(rows, [row for row in found if not row.skipped], columns, width)
        speculative = rows.num_accepted is not None
        longest = max((row.length for row in found), default=0)
        # Line 0 stands for no history; a speculative row keeps all of its tokens.
        pool = x.new_zeros(len(found) + 1, history - 1 + longest if speculative else history, x.shape[1])
        readers = [i for i, row in enumerate(found) if row.first_column is not None and not row.skipped]
        if lines is not None and readers:
            read = torch.tensor([found[i].read for i in readers])
            taken = torch.tensor([found[i].first_column for i in readers])[:, None] + torch.arange(history)
            pool[torch.tensor(readers) + 1, :history] = lines[read[:, None], taken]
        causal_conv1d_cpu(x, weight, bias, pool, _plan(found, speculative), y, silu=silu)
        if lines is not None:
            for used, writers in _writers(found, speculative, history).items():
                write = torch.tensor([found[i].write for i in writers])
                lines[write, :used] = pool[torch.tensor(writers) + 1, :used]


def _plan(found: list[HostRow], speculative: bool) -> Rows:
    """Return the rows over the pool: row i reads and writes line i + 1."""
    fields: list[list[int]] = [[found[0].begin if found else 0], *([] for _ in range(NUM_FIELDS - 1))]
    for i, row in enumerate(found):
        read = -1 if row.skipped else 0 if row.first_column is None else i + 1
        write = -1 if row.skipped else i + 1
        # Of a speculative row only the first token is certain to be accepted.
        committed = 1 if speculative else row.length
        for values, value in zip(fields, (row.end, read, write, committed, 0, 0, 0), strict=True):
            values.append(value)
    control = torch.tensor([fields[0], *([*values, 0] for values in fields[1:])], dtype=torch.int32)
    return Rows(control, 0, 1, max((row.length for row in found), default=0))


def _writers(found: list[HostRow], speculative: bool, history: int) -> dict[int, list[int]]:
    """Return the rows that write a line, by the number of columns that they write."""
    writers: dict[int, list[int]] = {}
    for i, row in enumerate(found):
        if not row.skipped:
            used = history - 1 + row.length if speculative else history
            writers.setdefault(used, []).append(i)
    return writers
