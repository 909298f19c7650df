"""The weights of the adapters of one projection, in device slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor
from deltaline_kernels.lora.tiles import AdapterTiles

MAX_RANK = 512


@dataclass(frozen=True, eq=False)
class OutputWeights:
    """What turns the sums of every slot into outputs, checked by the caller: as in `LoraWeights`, but for some of it.

    Args:
        b: `[slots, R, out]`, the last two dimensions of any strides.
        ranks, scales, factors: None for R, 1 and 1.
    """

    b: Tensor
    sizes: tuple[int, ...]
    ranks: Tensor | None = None
    scales: Tensor | None = None
    factors: Tensor | None = None

    def arguments(self, out: Tensor, tiles: AdapterTiles) -> tuple[Tensor | None, ...]:
        """Return what every kernel of outputs takes in this order: the weights, the outputs and the tiles."""
        return self.b, self.ranks, self.scales, self.factors, out, tiles.slots, tiles.tokens

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The sizes and strides that are constants of a kernel of outputs alone."""
        _, rank_stride, output_stride = self.b.stride()
        _, rank, outputs = self.b.shape
        sizes = {"N": outputs, "R": rank, "SIZES": self.sizes}
        return {**sizes, "RANK_STRIDE": rank_stride, "OUTPUT_STRIDE": output_stride}


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """What every slot adds to a projection of S slices: outputs side by side that have a rank and a scale of their own.

    Args:
        a: `[slots, S, R, in]`, R 1..512. b: `[slots, R, out]`, the transpose of what adapter files hold, so that the
            ranks that an adapter has are contiguous. Both contiguous, of one dtype: fp32, bf16 or fp16.
        ranks: `[slots, S]` int32, ranks in use: what lies behind them in a and b is not read. 0 leaves the slice's
            outputs as they are; above R counts as R.
        scales: `[slots, S]` fp32, for example alpha / rank.
        sizes: outputs of each slice; they add up to `out`.
        factors: `[slots, out]` fp32, what multiplies the outputs of a slot once its adapter is added (DoRA: the
            magnitude by the norm of the adapted weight), or None for 1.

    Contents are read on the device by each launch, and may change between launches.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor
    sizes: tuple[int, ...]
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
            raise TypeError(f"sizes: expected a tuple of integers, got {sizes!r}")
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes: expected at least one slice of at least 1 output, got {sizes}")
        check_tensor("a", self.a, (None, len(sizes), None, None), ACTIVATIONS, None)
        device = self.a.device
        slots, _, rank, inputs = self.a.shape
        if slots < 1 or inputs < 1 or not 1 <= rank <= MAX_RANK:
            shape = list(self.a.shape)
            raise ValueError(f"a: expected at least 1 slot and 1 input, and a rank of 1..{MAX_RANK}, got shape {shape}")
        outputs = sum(sizes)
        check_tensor("b", self.b, (slots, rank, outputs), (self.a.dtype,), device)
        check_tensor("ranks", self.ranks, (slots, len(sizes)), (torch.int32,), device)
        check_tensor("scales", self.scales, (slots, len(sizes)), (torch.float32,), device)
        if self.factors is not None:
            check_tensor("factors", self.factors, (slots, outputs), (torch.float32,), device)

    @cached_property
    def of_outputs(self) -> OutputWeights:
        return OutputWeights(self.b, self.sizes, self.ranks, self.scales, self.factors)

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a.shape[2]

    @property
    def num_inputs(self) -> int:
        return self.a.shape[3]

    @property
    def num_outputs(self) -> int:
        return self.b.shape[2]
