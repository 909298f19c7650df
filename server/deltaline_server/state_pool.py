"""The state of all sequences on the device: for each layer a conv line, a recurrent line and the drafts of a line.

Allocates all of it at start and zeroes lines; nothing else zeroes or allocates state. Knows lines, not who holds them
(lines.py, sequences.py), nor what a layer makes of them (layers.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_server.keys import ModelError
from deltaline_server.mixer_shape import MixerShape


@dataclass(frozen=True)
class LayerState:
    """The state of one layer, L lines: all that a mixer mutates.

    conv `[L, W-1+M, D]` in the model's dtype; recurrent `[L, HV, V, K]` (Mamba2 `[L, H, P, S]`) fp32 or bf16;
    drafts `[L, 2, M, record]` fp32, the record of a token as the mixer's shape says.
    """

    conv: Tensor
    recurrent: Tensor
    drafts: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the layer; the first dimension is the line."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StateOptions:
    """How much state to hold: lines besides the null line, most tokens of a VERIFY row, the recurrent state's dtype.

    limit_bytes caps the whole pool; 0 for no cap.
    """

    num_lines: int
    max_draft: int
    state_dtype: torch.dtype = torch.float32
    limit_bytes: int = 0


class StatePool:
    """The state lines of every layer. Line 0 is the null line: zero from the start, never written.

    layers: one LayerState per layer, in the order of `shapes`. bytes_per_sequence: of one line of every layer.
    total_bytes: of all lines, the null line included.
    """

    def __init__(
        self,
        shapes: Sequence[MixerShape],
        options: StateOptions,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate, after the sizes were checked in Python integers.

        Raises ModelError as check_state does, and when the device has no room.
        """
        self.bytes_per_sequence = check_state(shapes, options, dtype)
        self.total_bytes = self.bytes_per_sequence * (options.num_lines + 1)
        self.num_lines = options.num_lines
        self.max_draft = options.max_draft
        self.state_dtype = options.state_dtype
        self.device = device
        try:
            self.layers = tuple(
                LayerState(
                    *(
                        torch.zeros(options.num_lines + 1, *size, dtype=kind, device=device)
                        for size, kind in _line_shapes(shape, options, dtype)
                    )
                )
                for shape in shapes
            )
        except RuntimeError as error:  # that is how torch says that there is no room
            raise ModelError(
                f"--max-sequences: expected {device} to have room for {self.total_bytes} bytes of state, "
                f"{self.bytes_per_sequence} for each of {options.num_lines} sequences and the null line; it has not"
            ) from error

    def zero(self, lines: NDArray[np.int64]) -> None:
        """Zero these lines in every tensor of every layer, in place.

        Raises IndexError if one is not a line, before any is zeroed.
        """
        self.check_lines(lines)
        self.zero_at(torch.tensor(lines, dtype=torch.int64, device=self.device))

    def check_lines(self, lines: NDArray[np.int64]) -> None:
        """Raise IndexError if one is not a line."""
        if len(lines) and (lines.min() < 0 or lines.max() > self.num_lines):
            raise IndexError(f"lines: expected 0..{self.num_lines}, got {lines.min()}..{lines.max()}")

    def zero_at(self, index: Tensor) -> None:
        """As `zero`, for lines int64 `[n]` on the device, which nobody checks."""
        for layer in self.layers:
            for tensor in layer.tensors:
                tensor.index_fill_(0, index, 0)


def check_state(shapes: Sequence[MixerShape], options: StateOptions, dtype: torch.dtype) -> int:
    """Return the bytes of a line of every layer, in Python integers; allocate nothing.

    Raises ModelError: no line, no draft token, or a pool of more bytes than options.limit_bytes.
    """
    if options.num_lines < 1:
        raise ModelError(f"num_lines: expected at least 1, got {options.num_lines}")
    if options.max_draft < 1:
        raise ModelError(f"max_draft: expected at least 1, got {options.max_draft}")
    if options.state_dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"state_dtype: expected float32 or bfloat16, got {options.state_dtype}")
    plans = [_line_shapes(shape, options, dtype) for shape in shapes]
    line_bytes = sum(math.prod(size) * kind.itemsize for plan in plans for size, kind in plan)
    total_bytes = line_bytes * (options.num_lines + 1)
    if 0 < options.limit_bytes < total_bytes:
        raise ModelError(
            f"--state-bytes: expected at least {total_bytes} for {options.num_lines} sequences and the null "
            f"line of {line_bytes} bytes each, got a limit of {options.limit_bytes}"
        )
    return line_bytes


def _line_shapes(
    shape: MixerShape, options: StateOptions, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of one line of each tensor of a LayerState, in the order of its fields."""
    return (
        ((shape.conv_width - 1 + options.max_draft, shape.conv_channels), dtype),
        (shape.state, options.state_dtype),
        ((2, options.max_draft, shape.record), torch.float32),
    )
