"""The causal convolution of inference engines in plain loops: the truth that the engines' functions are tested against.

Written from the engines' semantics, row by row and token by token, for reading. Shares nothing with what it tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convolve(history: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return the outputs `(dim, n)` fp32 of tokens `(dim, n)` behind history `(dim, width-1)`."""
    window = torch.cat((history.float(), tokens.float()), dim=1)
    width = weight.shape[1]
    outputs = torch.zeros(tokens.shape)
    for t in range(tokens.shape[1]):
        total = torch.zeros(tokens.shape[0]) if bias is None else bias.float()
        for j in range(width):
            total = total + weight[:, j].float() * window[:, t + j]
        outputs[:, t] = total * torch.sigmoid(total) if silu else total
    return outputs


def field_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    starts: Sequence[int],
    lines: Sequence[int],
    has_history: Sequence[bool],
    silu: bool,
    pad: int = -1,
) -> Tensor:
    """Return the outputs of packed x `(dim, tokens)`, NaN where no row is; mutates states `(lines, dim, columns)`."""
    outputs = torch.full(x.shape, torch.nan)
    kept = weight.shape[1] - 1
    rounded = x if states is None else x.to(states.dtype)
    for i, line in enumerate(lines):
        begin, end = starts[i], starts[i + 1]
        if line < 0 or line == pad:
            outputs[:, begin:end] = 0
            continue
        history = torch.zeros(x.shape[0], kept)
        if states is not None and has_history[i]:
            history = states[line, :, :kept].float()
        tokens = rounded[:, begin:end].float()
        outputs[:, begin:end] = convolve(history, tokens, weight, bias, silu)
        if states is not None and end > begin:
            last = torch.cat((history, tokens), dim=1)[:, -kept:]
            states[line, :, :kept] = last.to(states.dtype)
    return outputs.to(x.dtype)


def field_update(
    rows: Sequence[Tensor],
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reads: Sequence[int],
    writes: Sequence[int],
    accepted: Sequence[int] | None,
    silu: bool,
    pad: int = -1,
) -> list[Tensor]:
    """Return the outputs of each of the rows `(dim, n)`; mutates states `(lines, dim, columns)`."""
    outputs = []
    kept = weight.shape[1] - 1
    before = states.clone()
    for i, row in enumerate(rows):
        skipped = min(reads[i], writes[i]) < 0 or pad in (reads[i], writes[i])
        if skipped or row.shape[1] == 0:
            outputs.append(torch.zeros(row.shape, dtype=row.dtype))
            continue
        first = 0 if accepted is None else max(accepted[i] - 1, 0)
        history = before[reads[i], :, first : first + kept].float()
        tokens = row.to(states.dtype).float()
        outputs.append(convolve(history, tokens, weight, bias, silu).to(row.dtype))
        window = torch.cat((history, tokens), dim=1)
        window = window[:, -kept:] if accepted is None else window[:, 1:]
        states[writes[i], :, : window.shape[1]] = window.to(states.dtype)
    return outputs
