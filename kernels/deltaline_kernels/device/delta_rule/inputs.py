"""What the kernels of a delta rule are given of a layer: the sizes of its heads, its tokens and their gates."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from deltaline_kernels.checks import MAX_HEAD_DIM, parse_number

# From so many rows x value heads on, short rows are computed by programs that take more of the state each.
MANY_HEADS = 256


@dataclass(frozen=True)
class DeltaHeads:
    """Sizes of one layer's heads; `keyed`: each key channel of a value head has a decay of its own."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    scale: float
    eps: float
    keyed: bool = False

    @cached_property
    def key_channels(self) -> int:
        return self.num_key_heads * self.key_dim

    @cached_property
    def value_channels(self) -> int:
        return self.num_value_heads * self.value_dim

    @cached_property
    def channels(self) -> int:
        """Values of one token: q, k, v."""
        return 2 * self.key_channels + self.value_channels

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, the columns of qkv `[T, 2*H*K + HV*V]`, as views."""
        q, k, v = qkv.split_with_sizes((self.key_channels, self.key_channels, self.value_channels), dim=1)
        return q, k, v

    @cached_property
    def record(self) -> int:
        """Values of one draft token: k, u, g."""
        return self.key_channels + self.value_channels + self.num_decays

    @cached_property
    def num_decays(self) -> int:
        """Decays of one token."""
        return self.num_value_heads * (self.key_dim if self.keyed else 1)

    @cached_property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads


@lru_cache(typed=True)
def find_heads(
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float | None,
    eps: float,
    *,
    keyed: bool = False,
) -> DeltaHeads:
    """Return the heads of these sizes, checked once for all launches; a scale of None is key_dim ** -0.5.

    Raises:
        TypeError, ValueError: naming the argument of `gated_delta` or `kda`, what was expected and what was got.
    """
    if num_value_heads < 1 or num_value_heads % num_key_heads:
        raise ValueError(f"state: expected a multiple of {num_key_heads} value heads, got {num_value_heads}")
    for name, size in (("K", key_dim), ("V", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"state: expected {name} of 1..{MAX_HEAD_DIM}, got {size}")
    scale = key_dim**-0.5 if scale is None else parse_number("scale", scale)
    eps = parse_number("eps", eps)
    for name, value in (("scale", scale), ("eps", eps)):
        if value <= 0.0:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    return DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim, scale, eps, keyed)


@dataclass(frozen=True, eq=False)
class DeltaInputs:
    """Packed tokens and their gates, checked by the caller.

    Args:
        q, k: `[T, H*K]`; v: `[T, HV*V]`; of one dtype, any row stride each.
        a: `[T, HV]`, of keyed heads `[T, HV*K]`; b: `[T, HV]`; of that dtype or fp32, any row stride.
        A_log: `[HV]`, dt_bias: as a token's a; both None where a and b are the log decay and the strength themselves.
        normalize: whether q and k are divided by their norms.
        lower_bound: of the log decay of keyed heads, below 0, which is then lower_bound * sigmoid(exp(A_log) * (a +
            dt_bias)); None: -exp(A_log) * softplus(a + dt_bias).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    heads: DeltaHeads
    normalize: bool = True
    lower_bound: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.v.shape[0]

    @property
    def device(self) -> torch.device:
        return self.v.device

    @property
    def dtype(self) -> torch.dtype:
        """That of q, k and v."""
        return self.v.dtype

    def empty_output(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return room for the outputs, `[T, HV, V]` in v's dtype or another."""
        size = (self.v.shape[0], self.heads.num_value_heads, self.heads.value_dim)
        return torch.empty(size, dtype=dtype or self.v.dtype, device=self.v.device)

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def strides(self) -> tuple[int, int, int]:
        """Those of the rows of q, k and v."""
        return self.q.stride(0), self.k.stride(0), self.v.stride(0)

    @cached_property
    def gates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors of the gates as kernels take them: what is not there is never read."""
        absent = self.a
        return (
            self.a,
            self.b,
            absent if self.A_log is None else self.A_log,
            absent if self.dt_bias is None else self.dt_bias,
        )

    @property
    def numbers(self) -> tuple[float, float, int, int]:
        """What kernels that read gates take in this order: scale, eps, and the strides of a and b."""
        return self.heads.scale, self.heads.eps, self.a.stride(0), self.b.stride(0)

    def count_strides(self, most: int) -> tuple[int, tuple[int, int, int]]:
        """Return the largest divisor of `most` and of the strides of q, k and v, and these in units of it."""
        unit = math.gcd(most, *self.strides)
        q_stride, k_stride, v_stride = self.strides
        return unit, (q_stride // unit, k_stride // unit, v_stride // unit)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes that are constants of every kernel."""
        heads = self.heads
        return {"H": heads.num_key_heads, "HV": heads.num_value_heads, "K": heads.key_dim, "V": heads.value_dim}
