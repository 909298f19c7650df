"""Random tokens, and FP8 weights whose blocks are of very different sizes. Around tokens and outputs there is more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import FP8_BLOCK, multiply_fp8_reference, pack_fp8

GAP = 8


@dataclass(frozen=True)
class Batch:
    x: Tensor
    weight: Tensor
    scales: Tensor

    def run(self, path: Path) -> Tensor:
        """Return the outputs; what lies between them stays as it was."""
        num_tokens, outputs = len(self.x), len(self.weight)
        whole = torch.full((num_tokens, outputs + GAP), torch.nan, dtype=path.dtype, device=path.device)
        whole[:, outputs:] = 7.0
        path.multiply_fp8(self.x, pack_fp8(self.weight), self.scales, whole[:, :outputs])
        assert bool((whole[:, outputs:] == 7.0).all())
        return whole[:, :outputs]

    def run_reference(self) -> Tensor:
        """Return the outputs of the reference, in fp64 of these very inputs."""
        return multiply_fp8_reference(self.x.double(), self.weight, self.scales)


def stored(*size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw weights `[..., out, in]` of every kind of e4m3 numbers but NaN, and their scales, so that outputs are about
    1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    values[values & 127 == 127] = 0x7E
    grid = *size[:-2], -(-size[-2] // FP8_BLOCK), -(-size[-1] // FP8_BLOCK)
    scales = torch.randn(grid, generator=generator).exp() * (100.0 * size[-1] ** 0.5) ** -1
    return values.view(torch.float8_e4m3fn), scales


def make_batch(path: Path, num_tokens: int, outputs: int, inputs: int, seed: int = 0) -> Batch:
    """Make inputs on the path's device."""
    weight, scales = stored(outputs, inputs, seed=seed)
    x = torch.randn(num_tokens, inputs + GAP, generator=torch.Generator().manual_seed(seed + 1))
    x[:, inputs:] = torch.nan
    return Batch(x.to(path.device, path.dtype)[:, :inputs], weight.to(path.device), scales.to(path.device))
