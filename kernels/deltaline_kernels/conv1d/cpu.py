"""Causal convolution over packed rows on the CPU: vectorised PyTorch, tap by tap over blocks that fit in cache."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.conv1d.inputs import ConvInputs
from deltaline_kernels.cpu.elementwise import evenly_
from deltaline_kernels.cpu.row_groups import RowGroup, group_rows, put, take
from deltaline_kernels.rows import Rows

# Values per block: 256 tokens x 3072 channels was the fastest of 32..2048 tokens (2 cores, 1 MiB of L2 each).
BLOCK_VALUES = 256 * 3072


def causal_conv1d_cpu(inputs: ConvInputs, rows: Rows, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, D]`; mutates the lines."""
    w, bias = inputs.weight.float(), inputs.bias
    b = None if bias is None else bias.float()
    groups, skipped = group_rows(rows, inputs.line_shift)
    for begin, end in skipped:
        y[begin:end] = 0
    for group in groups:
        _convolve_group(inputs, w, b, group, y)


def _convolve_group(inputs: ConvInputs, w: Tensor, b: Tensor | None, group: RowGroup, y: Tensor) -> None:
    x, lines = inputs.x, inputs.lines
    history, c = w.shape[0] - 1, group.committed
    tokens = group.tokens(x)  # (B, n, D)
    if group.reads:
        before = take(lines, group.read_index)[:, group.replayed : group.replayed + history].to(x.dtype)
    else:
        before = torch.zeros((), dtype=x.dtype).expand(group.num_rows, history, x.shape[1])
    out, in_place = group.empty_output(y)
    # Only the first tokens see the line; those behind them need no copy.
    seen = history if c > history else group.length
    head = torch.cat((before, tokens[:, :seen]), dim=1)
    kept = tokens[:, c - history :] if c > history else head[:, c:]
    for part, block in _blocks(*tokens.shape):
        total = out[part, block]
        begin, end = block.start, block.start + total.shape[1]
        if end <= seen:
            _convolve(head[part, begin : end + history], w, b, total)
        else:
            first = max(begin, seen)
            _convolve(tokens[part, first - history : end], w, b, total[:, first - begin :])
            if begin < seen:
                _convolve(head[part, begin:], w, b, total[:, : seen - begin])
        if inputs.silu:
            evenly_(partial(F.silu, inplace=True), total)
    if not in_place:
        put(y, group.token_index, out.flatten(0, 1))
    if group.writes:
        put(lines[:, : kept.shape[1]], group.write_index, kept)
    for done in group.waypoints:
        rows, waypoints = group.lines_at(done)
        put(lines[:, :history], waypoints, take(tokens, rows)[:, done - history : done])


def _blocks(num_rows: int, length: int, channels: int) -> list[tuple[slice, slice]]:
    """Return blocks of rows and tokens that are contiguous in `[B, n, D]`: whole rows, or a piece of one row."""
    if length == 0:
        return []
    per_block = max(1, BLOCK_VALUES // max(1, length * channels))
    step = length if per_block > 1 else max(1, BLOCK_VALUES // max(1, channels))
    blocks = []
    for row in range(0, num_rows, per_block):
        for token in range(0, length, step):
            blocks.append((slice(row, row + per_block), slice(token, token + step)))
    return blocks


def _convolve(full: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """Write b + sum_j w[j] full[:, t+j] to out `[B, n, D]` fp32."""
    n = out.shape[1]
    torch.mul(full[:, :n], w[0], out=out)
    for j in range(1, w.shape[0]):
        out.addcmul_(full[:, j : j + n].to(torch.float32), w[j])
    if b is not None:
        out.add_(b)
