"""The rows, inputs and fp32 truth of one convolution case. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.lines import LinesBatch, LinesShape, Mode


@dataclass(frozen=True)
class Shape(LinesShape):
    """`width` taps on D channels. VERIFY: `width` - 1 + tokens columns per line.

    Args:
        split: the channels of the parts in which our own side returns its output, or None for the whole.
    """

    channels: int = 8192
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    split: tuple[int, ...] | None = None

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

    def words(self) -> dict[str, str]:
        return {"x": f"[{self.num_tokens}, {self.channels}]", "rows": str(self.num_rows), "width": str(self.width)}

    def num_bytes(self) -> int:
        """Count each input read once and each output written once: tokens, weights, histories, lines."""
        # The oldest column of a verified line is not needed: at least one token of every verify is accepted.
        written = self.history - 1 + self.max_length if self.mode is Mode.VERIFY else self.history
        kept = self.num_continuing * self.history + self.num_rows * written + len(self.places) * self.history
        vectors = 2 * self.num_tokens + self.width + 1 + kept
        return vectors * self.channels * self.dtype.itemsize

    def num_flops(self) -> int:
        """Count a multiplication and an addition per tap."""
        return 2 * self.width * self.num_tokens * self.channels


class Batch(LinesBatch[Shape]):
    """Tokens, weights and what the lines hold. `new_lines` makes what a side may mutate."""

    def __init__(self, shape: Shape, seed_name: str, device: torch.device) -> None:
        super().__init__(shape, seed_name, device)
        dtype = shape.dtype
        self.x = self.normal(shape.num_tokens, shape.channels, dtype=dtype)
        self.weight = self.normal(shape.width, shape.channels, dtype=dtype) * 0.5
        self.bias = self.normal(shape.channels, dtype=dtype)
        self.scatter_lines()
        size = (shape.num_columns, shape.channels)
        self.first_lines = torch.full((self.num_lines, *size), torch.nan, dtype=dtype, device=device)
        self.first_lines[self.line_index[self.continues]] = self.normal(shape.num_continuing, *size, dtype=dtype)
        if shape.mode is Mode.VERIFY:
            self.accept_drafts()

    @property
    def offset(self) -> Tensor:
        """The column `[N]` at which a row's history begins: behind the accepted drafts but the last one."""
        return (self.accepted - 1).clamp(min=0)

    @cached_property
    def taps(self) -> tuple[Tensor, Tensor]:
        """The weights `[D, W]`, contiguous, as the peers keep them, and the bias."""
        return self.weight.t().contiguous(), self.bias

    def new_lines(self, num_columns: int) -> Tensor:
        """Return a copy `[L, num_columns, D]` of the first columns of the lines."""
        return self.first_lines[:, :num_columns].clone(memory_format=torch.contiguous_format)

    def reset(self, lines: Tensor) -> None:
        """Put back what `new_lines` returned."""
        lines.copy_(self.first_lines[:, : lines.shape[1]])

    def expected(self) -> dict[str, Tensor]:
        """Return the fp32 truth.

        y: `[T, D]`. line: `[N, columns, D]`, the columns of each row's line after the step. window: the same as the
        field keeps it, which after a verify has no use for the oldest column. waypoints: `[places, W-1, D]`, if any.
        """
        shape, history = self.shape, self.shape.history
        weight, bias = self.weight.float(), self.bias.float()
        y = torch.empty(self.x.shape, dtype=torch.float32, device=self.device)
        lines = []
        offsets, starts = self.offset.tolist(), shape.starts
        for row, line in enumerate(self.line_index.tolist()):
            begin, end = starts[row], starts[row + 1]
            if shape.is_fresh(row):
                before = torch.zeros(history, shape.channels, device=self.device)
            else:
                before = self.first_lines[line, offsets[row] : offsets[row] + history].float()
            full = torch.cat((before, self.x[begin:end].float()))
            total = bias.expand(end - begin, -1).clone()
            for tap in range(shape.width):
                total += weight[tap] * full[tap : tap + end - begin]
            y[begin:end] = F.silu(total)
            lines.append(full if shape.mode is Mode.VERIFY else full[end - begin :])
        line = torch.stack(lines)
        found = {"y": y, "line": line, "window": line[:, 1:] if shape.mode is Mode.VERIFY else line}
        ends = [starts[row] + done for row, done in shape.places]
        kept = [self.x[end - history : end].float() for end in ends]
        return found | ({"waypoints": torch.stack(kept)} if kept else {})
