"""What the Mamba2 kernels are given of a layer: the sizes of its heads, its tokens and the weights of its heads."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Real

import torch
from torch import Tensor

from deltaline_kernels.checks import MAX_HEAD_DIM


@dataclass(frozen=True)
class MambaHeads:
    """Sizes of one layer's heads, and the limits of a token's time step behind its softplus."""

    num_groups: int
    num_heads: int
    head_dim: int
    state_dim: int
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @cached_property
    def value_channels(self) -> int:
        return self.num_heads * self.head_dim

    @cached_property
    def key_channels(self) -> int:
        return self.num_groups * self.state_dim

    @cached_property
    def channels(self) -> int:
        """Values of one token: x, B, C."""
        return self.value_channels + 2 * self.key_channels

    @cached_property
    def record(self) -> int:
        """Values of one draft token: B, u, g."""
        return self.key_channels + self.value_channels + self.num_heads


@lru_cache(typed=True)
def find_heads(
    num_groups: int, num_heads: int, head_dim: int, state_dim: int, dt_limit: tuple[float, ...]
) -> MambaHeads:
    """Return the heads of these sizes, checked once for all launches.

    Raises:
        TypeError, ValueError: naming the argument of `mamba2`, what was expected and what was got.
    """
    if num_heads < 1 or num_heads % num_groups:
        raise ValueError(f"state: expected a multiple of {num_groups} heads, got {num_heads}")
    for name, size in (("P", head_dim), ("S", state_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"state: expected {name} of 1..{MAX_HEAD_DIM}, got {size}")
    if len(dt_limit) != 2 or not all(isinstance(one, Real) and not isinstance(one, bool) for one in dt_limit):
        raise TypeError(f"dt_limit: expected two numbers, got {dt_limit!r}")
    least, greatest = dt_limit
    if not (0.0 <= least < math.inf and least <= greatest):
        raise ValueError(f"dt_limit: expected 0 <= least <= greatest, got {dt_limit}")
    return MambaHeads(num_groups, num_heads, head_dim, state_dim, (float(least), float(greatest)))


@dataclass(frozen=True, eq=False)
class MambaInputs:
    """Packed tokens, their time steps and the heads' weights, checked by the caller.

    Args:
        xBC: `[T, H*P + 2*G*S]`, any row stride. dt: `[T, H]` of xBC's dtype or fp32, any row stride.
        rate: `[H]`, A_log, or without `log_rate` the rate of the decay itself, at most 0.
        D, dt_bias: `[H]`; None is zero.
        softplus: False: the time step is dt + dt_bias, clamped in chunks of 16-bit values alone.
    """

    xBC: Tensor
    dt: Tensor
    rate: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    heads: MambaHeads
    log_rate: bool = True
    softplus: bool = True

    @property
    def num_tokens(self) -> int:
        return self.xBC.shape[0]

    @property
    def device(self) -> torch.device:
        return self.xBC.device

    def empty_output(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return room for the outputs, `[T, H, P]` in xBC's dtype or another."""
        size = (self.xBC.shape[0], self.heads.num_heads, self.heads.head_dim)
        return torch.empty(size, dtype=dtype or self.xBC.dtype, device=self.xBC.device)

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """rate, D and dt_bias as kernels take them: what is not there is never read."""
        absent = self.rate
        return self.rate, absent if self.D is None else self.D, absent if self.dt_bias is None else self.dt_bias

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes that are constants of every kernel."""
        heads = self.heads
        return {"H": heads.num_heads, "G": heads.num_groups, "P": heads.head_dim, "S": heads.state_dim}

    @cached_property
    def steps(self) -> dict[str, bool]:
        """How time steps are computed, constants of every kernel that does it."""
        return {"LOG_RATE": self.log_rate, "SOFTPLUS": self.softplus, "HAS_BIAS": self.dt_bias is not None}
