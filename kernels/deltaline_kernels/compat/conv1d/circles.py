"""Lines that are circles, as the causal-conv1d package has them: a token's column is its number modulo the columns."""

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import check_indices


def take_turn(
    conv_state: Tensor, tokens: Tensor, length: int, counts: Tensor, lines: Tensor | None, pad: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the histories of rows `(N, D, width-1)`, copies, and the history of each row, `pad` where it is skipped.

    Mutates conv_state `(lines, D, columns)`: the next `length` tokens of each row, of tokens `(N * length, D)`, are in
    their columns; of more than there are columns the last ones. counts: `(N,)` int32 or int64, tokens before them.
    lines: `(N,)`, or None where row i has line i. Waits for nothing.
    """
    num_rows, columns, device = tokens.shape[0] // length if length else 0, conv_state.shape[2], conv_state.device
    check_indices("cache_seqlens", counts, device, num_rows)
    row = torch.arange(num_rows, device=device)
    line = row if lines is None else lines.to(torch.int64)
    is_live = (line >= 0) & (line != pad) if lines is not None else torch.ones_like(row, dtype=torch.bool)
    line = torch.where(is_live, line, 0)  # of a skipped row any that there is: pad may be beyond the last one
    circles = conv_state.transpose(1, 2)
    begin = counts[:, None].to(torch.int64)
    histories = circles[line[:, None], (begin + torch.arange(1 - width, 0, device=device)) % columns]
    if num_rows:
        # A skipped row does what the first live one does; if all are skipped, each writes what is there.
        as_row = torch.where(is_live, row, is_live.int().argmax())
        first = max(0, length - columns)
        at = line[as_row, None], (begin[as_row] + torch.arange(first, length, device=device)) % columns
        last = tokens.view(num_rows, length, -1)[as_row, first:].to(conv_state.dtype)
        circles[at] = torch.where(is_live[as_row, None, None], last, circles[at])
    return histories.transpose(1, 2), torch.where(is_live, row, -1)
