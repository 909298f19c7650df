"""The rows, inputs and fp32 truth of one convolution case. Knows no implementation."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class Mode(Enum):
    """What the rows of a batch do."""

    PREFILL = "prefill"
    UPDATE = "update"
    VERIFY = "verify"


@dataclass(frozen=True)
class Shape:
    """Rows and sizes: `lengths` tokens per row, `width` taps. VERIFY: `width` - 1 + tokens columns per line."""

    mode: Mode
    lengths: tuple[int, ...]
    channels: int
    width: int
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def history(self) -> int:
        """Tokens before a row that its convolution sees."""
        return self.width - 1

    @property
    def is_uniform(self) -> bool:
        return min(self.lengths) == self.max_length

    @property
    def num_columns(self) -> int:
        """Columns of a line that a step may have to keep: PREFILL and UPDATE the history, VERIFY all drafts too."""
        return self.history + (self.max_length if self.mode is Mode.VERIFY else 0)

    def is_fresh(self, row: int) -> bool:
        """Say whether a row starts from the zero state: every other row of a prefill."""
        return self.mode is Mode.PREFILL and row % 2 == 0

    def num_bytes(self) -> int:
        """Count each input read once and each output written once: tokens, weights, histories, lines."""
        continuing = sum(not self.is_fresh(row) for row in range(self.num_rows))
        # The oldest column of a verified line is not needed: at least one token of every verify is accepted.
        written = self.history - 1 + self.max_length if self.mode is Mode.VERIFY else self.history
        vectors = 2 * self.num_tokens + self.width + 1 + continuing * self.history + self.num_rows * written
        return vectors * self.channels * self.dtype.itemsize

    def num_flops(self) -> int:
        """Count a multiplication and an addition per tap."""
        return 2 * self.width * self.num_tokens * self.channels


class Batch:
    """Random inputs of a shape, the same for a seed: tokens, weights, and lines scattered over a pool.

    The lines that no row may read hold NaN. Nothing here is mutated by a side: `new_lines` makes copies.

    Args:
        seed_name: what the random numbers depend on, beside the shape.
    """

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        # Its own generator: a capture that fails may leave the default one unusable.
        self._generator = torch.Generator(device).manual_seed(zlib.crc32(seed_name.encode()))
        self.x = self._normal(shape.num_tokens, shape.channels)
        self.weight = self._normal(shape.width, shape.channels) * 0.5
        self.bias = self._normal(shape.channels)
        # Line 0 is the null line of every side; some lines belong to nobody.
        num_lines = 2 + shape.num_rows + shape.num_rows // 4
        order = torch.randperm(num_lines - 1, generator=self._generator, device=device) + 1
        self.line_index = order[: shape.num_rows]
        fresh = torch.tensor([shape.is_fresh(row) for row in range(shape.num_rows)], device=device)
        self.continues = ~fresh
        self.first_lines = torch.full(
            (num_lines, shape.num_columns, shape.channels), torch.nan, dtype=shape.dtype, device=device
        )
        read = self.line_index[self.continues]
        self.first_lines[read] = self._normal(len(read), shape.num_columns, shape.channels)
        if shape.mode is Mode.VERIFY:
            self.accepted = torch.randint(
                1, shape.max_length + 1, (shape.num_rows,), generator=self._generator, device=device
            )
        else:
            self.accepted = torch.ones(shape.num_rows, dtype=torch.int64, device=device)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device).to(self.shape.dtype)

    @cached_property
    def starts(self) -> list[int]:
        """First packed token of each row, and the end of the last one."""
        found = [0]
        for length in self.shape.lengths:
            found.append(found[-1] + length)
        return found

    @cached_property
    def weight_by_channel(self) -> Tensor:
        """The weights `[D, W]`, contiguous, as the peers keep them."""
        return self.weight.t().contiguous()

    def new_lines(self, num_columns: int) -> Tensor:
        """Return a copy `[L, num_columns, D]` of the first columns of the lines."""
        return self.first_lines[:, :num_columns].clone(memory_format=torch.contiguous_format)

    def reset(self, lines: Tensor) -> None:
        """Put back what `new_lines` returned."""
        lines.copy_(self.first_lines[:, : lines.shape[1]])

    def int32(self, values: Tensor | list[int]) -> Tensor:
        """Return `values` as int32 on the batch's device."""
        return torch.as_tensor(values).to(device=self.device, dtype=torch.int32)

    def expected(self) -> dict[str, Tensor]:
        """Return the fp32 truth.

        y: `[T, D]`. line: `[N, columns, D]`, the columns of each row's line after the step. window: the same as the
        field keeps it, which after a verify has no use for the oldest column.
        """
        shape, history = self.shape, self.shape.history
        weight, bias = self.weight.float(), self.bias.float()
        y = torch.empty(self.x.shape, dtype=torch.float32, device=self.device)
        lines = []
        accepted = self.accepted.tolist()
        for row, line in enumerate(self.line_index.tolist()):
            begin, end = self.starts[row], self.starts[row + 1]
            if shape.is_fresh(row):
                before = torch.zeros(history, shape.channels, device=self.device)
            else:
                offset = accepted[row] - 1
                before = self.first_lines[line, offset : offset + history].float()
            full = torch.cat((before, self.x[begin:end].float()))
            total = bias.expand(end - begin, -1).clone()
            for tap in range(shape.width):
                total += weight[tap] * full[tap : tap + end - begin]
            y[begin:end] = F.silu(total)
            lines.append(full if shape.mode is Mode.VERIFY else full[end - begin :])
        line = torch.stack(lines)
        return {"y": y, "line": line, "window": line[:, 1:] if shape.mode is Mode.VERIFY else line}
