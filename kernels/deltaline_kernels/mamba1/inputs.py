"""What the Mamba-1 kernels are given of a layer: its sizes, its tokens and the weights of its channels."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from deltaline_kernels.checks import MAX_HEAD_DIM


@dataclass(frozen=True)
class ScanSizes:
    """Sizes of one layer: channels, those of a group sharing B and C, and states of each channel."""

    num_groups: int
    channels: int
    state_dim: int

    @cached_property
    def group_channels(self) -> int:
        return self.channels // self.num_groups

    @cached_property
    def key_channels(self) -> int:
        """Values of a token's B."""
        return self.num_groups * self.state_dim

    @cached_property
    def record(self) -> int:
        """Values of one draft token: B, u and the time steps."""
        return self.key_channels + 2 * self.channels


@lru_cache(typed=True)
def find_sizes(num_groups: int, channels: int, state_dim: int) -> ScanSizes:
    """Return these sizes, checked once for all launches.

    Raises:
        ValueError: naming the argument of `mamba1`, what was expected and what was got.
    """
    if channels < 1 or channels % num_groups:
        raise ValueError(f"state: expected a multiple of {num_groups} channels, got {channels}")
    if not 1 <= state_dim <= MAX_HEAD_DIM:
        raise ValueError(f"state: expected S of 1..{MAX_HEAD_DIM}, got {state_dim}")
    return ScanSizes(num_groups, channels, state_dim)


@dataclass(frozen=True, eq=False)
class ScanInputs:
    """Packed tokens, their time steps and the channels' weights, checked by the caller.

    Args:
        x: `[T, D]`, any row stride. dt: `[T, D]` of x's dtype or fp32, any row stride.
        BC: `[T, 2*G*S]` (B | C) of x's dtype or fp32, any row stride.
        z: `[T, D]` of x's dtype or fp32, any row stride; None: outputs have no gate.
        rate: `[D, S]`, A_log, or without `log_rate` the rate of the decay itself.
        D, dt_bias: `[D]`; None is zero.
        softplus: False: the time step is dt + dt_bias.
    """

    x: Tensor
    dt: Tensor
    BC: Tensor
    z: Tensor | None
    rate: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    heads: ScanSizes
    log_rate: bool = True
    softplus: bool = True

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def device(self) -> torch.device:
        return self.x.device

    def empty_output(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return room for the outputs, `[T, D]` in x's dtype or another."""
        return torch.empty(self.x.shape, dtype=dtype or self.x.dtype, device=self.x.device)
