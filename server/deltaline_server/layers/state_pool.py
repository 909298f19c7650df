"""The state of all sequences on the device: for each recurrent layer a conv line, a recurrent line and the drafts of a
line, for each attention layer the pages of its keys and values.

Allocates all of it at start and zeroes lines; nothing else zeroes or allocates state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.kv_cache import KvPlan, allocate_cache, check_page_size, plan_cache
from deltaline_server.layers.shapes import MixerShape, PagedShape, RecurrentShape


@dataclass(frozen=True)
class LayerState:
    """The state of one recurrent layer, L lines: all that its mixer mutates.

    conv `[L, W-1+M, D]` in the model's dtype; recurrent `[L, HV, V, K]` (Mamba2 `[L, H, P, S]`, Mamba-1
    `[L, HV, V, S]`) fp32 or bf16; drafts `[L, 2, M, record]` fp32, the record of a token as the mixer's shape says. Of
    a short convolution the last two are empty.
    """

    conv: Tensor
    recurrent: Tensor
    drafts: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the layer; the first dimension is the line."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class LineBlock:
    """The lines of layers that are alike, which lie together, so that a line of all of them is one operation's.

    layers: the layers' places in the pool, in the block's order. tensors: in the order of LayerState's fields, each
    `[layers, L, ...]`; the layers' states are views of them.
    """

    layers: tuple[int, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class StateOptions:
    """How much state to hold: lines of sequences, most tokens of a VERIFY row, the recurrent state's dtype.

    snapshot_lines: beside those of sequences and the null line. limit_bytes caps the whole pool; 0 for no cap.
    page_size: tokens of a page of attention layers.
    """

    num_lines: int
    max_draft: int
    state_dtype: torch.dtype = torch.float32
    limit_bytes: int = 0
    page_size: int = 64
    snapshot_lines: int = 0

    @property
    def total_lines(self) -> int:
        """All lines but the null line."""
        return self.num_lines + self.snapshot_lines

    @property
    def counted_lines(self) -> str:
        """The lines in words."""
        snapshots = f", {self.snapshot_lines} snapshots" if self.snapshot_lines else ""
        return f"{self.num_lines} sequences{snapshots} and the null line"


@dataclass(frozen=True)
class StatePlan:
    """How much a pool takes, in Python integers: bytes of one line of every layer, its pages if any, and all bytes."""

    line_bytes: int
    kv: KvPlan | None
    total_bytes: int


class StatePool:
    """The state of every layer. Line 0 is the null line: zero from the start, never written.

    layers: one state per layer, in the order of `shapes`: a LayerState or, of attention, a KvState. bytes_per_sequence:
    of one line of every layer. total_bytes: of all lines, the null line included, and all pages. line_blocks: where
    the lines lie. kv: sizes of the pages, None where no layer has any; page_table: the table that these layers share;
    page_blocks: where their pages lie together (allocate_cache).
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

        Raises ModelError as plan_state does, and when the device has no room.
        """
        plan = plan_state(shapes, options, dtype)
        self.kv = plan.kv
        self.bytes_per_sequence, self.total_bytes = plan.line_bytes, plan.total_bytes
        self.num_lines = options.total_lines
        self.max_draft = options.max_draft
        self.state_dtype = options.state_dtype
        self.device = device
        paged = [shape for shape in shapes if isinstance(shape, PagedShape)]
        try:
            caches, self.page_blocks = (
                allocate_cache(paged, plan.kv, self.num_lines, dtype, device) if plan.kv else ([], [])
            )
            self.line_blocks = _allocate_lines(shapes, options, dtype, device)
        except RuntimeError as error:  # that is how torch says that there is no room
            raise ModelError(
                f"--max-sequences: expected {device} to have room for {self.total_bytes} bytes of state, "
                f"{self.bytes_per_sequence} of lines for each of {options.counted_lines}, and pages; it has not"
            ) from error
        self.page_table = caches[0].page_table if caches else None
        states = {
            place: LayerState(*tensors)
            for block in self.line_blocks
            for place, *tensors in zip(block.layers, *block.tensors, strict=True)
        }
        rest = iter(caches)
        self.layers: tuple[Any, ...] = tuple(states[i] if i in states else next(rest) for i in range(len(shapes)))

    def zero(self, lines: NDArray[np.int64]) -> None:
        """Zero these lines in every tensor of lines of every layer and in the table of pages, in place.

        Raises IndexError if one is not a line, before any is zeroed.
        """
        self.check_lines(lines)
        self.zero_at(torch.tensor(lines, dtype=torch.int64, device=self.device))

    def check_lines(self, lines: NDArray[np.int64]) -> None:
        """Raise IndexError if one is not a line."""
        if len(lines) and (lines.min() < 0 or lines.max() > self.num_lines):
            raise IndexError(f"lines: expected 0..{self.num_lines}, got {lines.min()}..{lines.max()}")

    def zero_at(self, index: Tensor) -> None:
        """As `zero`, for lines int64 `[n]` on the device, unchecked."""
        for block in self.line_blocks:
            for tensor in block.tensors:
                tensor.index_fill_(1, index, 0)
        if self.page_table is not None:
            self.page_table.index_fill_(0, index, 0)

    def put_pages(self, new_pages: Tensor) -> None:
        """Write pages into the table: int32 `[3, n]` on the device, a line, a place in it and the page of each.

        Line 0 at place 0 with page 0 writes nothing that matters. Raises ValueError where no layer has pages.
        """
        if self.page_table is None:
            raise ValueError("new_pages: expected None, as this model has no attention layers")
        lines, places = new_pages[:2].long()
        self.page_table.index_put_((lines, places), new_pages[2])

    def place_rows(self, lines: Tensor, pages: Tensor) -> None:
        """Begin rows of the table: lines int64 `[n]`, none twice, with pages int32 `[n, k]`, both on the device.

        Raises ValueError where no layer has pages.
        """
        if self.page_table is None:
            raise ValueError("pages: expected none, as this model has no attention layers")
        self.page_table[:, : pages.shape[1]].index_copy_(0, lines, pages)

    def copy_pages(self, copies: Tensor, beside: Sequence[Tensor] | None = None) -> None:
        """Copy pages in every layer: int64 `[2, m]` on the device, pages and those to become copies of them, which are
        none of the former; but page 0 may be copied to itself.

        beside: of each of page_blocks `[2 * layers, m, page_size, HKV, D]`, to be used on the way; None: allocated.
        """
        source, target = copies
        for i, block in enumerate(self.page_blocks):
            taken = torch.index_select(block, 1, source, out=None if beside is None else beside[i])
            block.index_copy_(1, target, taken)


def plan_state(shapes: Sequence[MixerShape], options: StateOptions, dtype: torch.dtype) -> StatePlan:
    """Return how much a pool takes, in Python integers; allocate nothing.

    Lines come first; what options.limit_bytes leaves is for pages. Raises ModelError: no line, no draft token, a bad
    page size, or a pool of more bytes than the limit, one page at least.
    """
    if options.num_lines < 1:
        raise ModelError(f"num_lines: expected at least 1, got {options.num_lines}")
    if options.max_draft < 1:
        raise ModelError(f"max_draft: expected at least 1, got {options.max_draft}")
    if options.state_dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(f"state_dtype: expected float32 or bfloat16, got {options.state_dtype}")
    paged = [shape for shape in shapes if isinstance(shape, PagedShape)]
    plans = [_line_shapes(shape, options, dtype) for shape in shapes if not isinstance(shape, PagedShape)]
    line_bytes = sum(math.prod(size) * kind.itemsize for plan in plans for size, kind in plan)
    if options.snapshot_lines < 0:
        raise ModelError(f"snapshot_lines: expected at least 0, got {options.snapshot_lines}")
    limit, num_lines, kv, pages = options.limit_bytes, options.total_lines + 1, None, ""
    if paged:
        check_page_size(options.page_size)
        room = limit - line_bytes * num_lines if limit else None
        kv = plan_cache(paged, options.total_lines, options.page_size, room, dtype)
        if kv.num_pages < 1:
            kv = replace(kv, num_pages=1, max_context=min(paged[0].max_positions, options.page_size))
        line_bytes += kv.max_pages * torch.int32.itemsize
        pages = f", and 2 pages of {kv.page_bytes}"
    total_bytes = line_bytes * num_lines + (kv.total_bytes if kv else 0)
    if 0 < limit < total_bytes:
        raise ModelError(
            f"--state-bytes: expected at least {total_bytes} for {options.counted_lines} of {line_bytes} bytes "
            f"each{pages}, got a limit of {limit}"
        )
    return StatePlan(line_bytes, kv, total_bytes)


def line_parts(shape: RecurrentShape, options: StateOptions, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of one line of a recurrent layer by the tensor of its LayerState, in Python integers."""
    names = (field.name for field in fields(LayerState))
    sizes = _line_shapes(shape, options, dtype)
    return {name: math.prod(size) * kind.itemsize for name, (size, kind) in zip(names, sizes, strict=True)}


def _allocate_lines(
    shapes: Sequence[MixerShape], options: StateOptions, dtype: torch.dtype, device: torch.device
) -> tuple[LineBlock, ...]:
    """Allocate the lines of the recurrent layers among these."""
    alike: dict[RecurrentShape, list[int]] = {}
    for place, shape in enumerate(shapes):
        if not isinstance(shape, PagedShape):
            alike.setdefault(shape, []).append(place)
    return tuple(
        LineBlock(
            tuple(places),
            tuple(
                torch.zeros(len(places), options.total_lines + 1, *size, dtype=kind, device=device)
                for size, kind in _line_shapes(shape, options, dtype)
            ),
        )
        for shape, places in alike.items()
    )


def _line_shapes(
    shape: RecurrentShape, options: StateOptions, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of one line of each tensor of a LayerState, in the order of its fields."""
    return (
        ((shape.conv_width - 1 + options.max_draft, shape.conv_channels), dtype),
        (shape.state, options.state_dtype),
        ((2, options.max_draft, shape.record), torch.float32),
    )
