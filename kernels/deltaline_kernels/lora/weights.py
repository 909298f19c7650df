"""The weights of the adapters of one projection, in device slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_tensor

MAX_RANK = 512


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
        if not isinstance(self.a, Tensor):
            raise TypeError(f"a: expected a tensor, got {type(self.a).__name__}")
        device = self.a.device
        check_tensor("a", self.a, (None, len(sizes), None, None), ACTIVATIONS, device)
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
