"""What mixes the streams of a hyper-connected layer before and after a sublayer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaline_kernels.checks import (
    ACTIVATIONS,
    check_no_gradient,
    check_positive,
    check_tensor,
    parse_eps,
    parse_number,
)

MAX_STREAMS = 8
# Numbers of bf16 that have all bits of one of fp32.
NUM_TERMS = 3
# Columns of a product: the least that a matrix instruction takes.
LEAST_COLUMNS = 16


@dataclass(frozen=True, eq=False)
class Gates:
    """The parameters of one hyper-connection of S streams of H channels: see `mhc_pre`.

    Args:
        weight: `[S*(2+S), S*H]` fp32, contiguous; rows: pre `[S]`, post `[S]`, comb `[S, S]` row-major; columns:
            streams one behind the other.
        scale: `[3]` fp32, of pre, post and comb.
        base: `[S*(2+S)]` fp32, in the order of the weight's rows.
        rms_eps: added to the mean square of a token's streams. pre_eps: added to pre. sinkhorn_eps: added to the
            softmax and to every sum that divides.
        post_multiplier: what post's sigmoid is multiplied by.
        sinkhorn_repeat: normalisations of columns, at least 1; before each but the first one of rows.
        terms: no argument: None, or what `prepare_gates` makes of the weight, `[3, columns, S*H]` bf16, whose sum over
            the first axis is the weight, its rows in the order of a product's columns. bf16 streams meet it.

    Contents are read on the device by each launch.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """

    weight: Tensor
    scale: Tensor
    base: Tensor
    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    post_multiplier: float = 2.0
    sinkhorn_repeat: int = 20
    terms: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        fp32 = (torch.float32,)
        check_tensor("weight", self.weight, (None, None), fp32, None)
        device = self.weight.device
        rows, columns = self.weight.shape
        streams = count_streams(rows)
        if columns < streams or columns % streams:
            raise ValueError(f"weight: expected columns for {streams} streams, got shape {list(self.weight.shape)}")
        check_tensor("scale", self.scale, (3,), fp32, device)
        check_tensor("base", self.base, (rows,), fp32, device)
        for name in ("rms_eps", "pre_eps", "sinkhorn_eps"):
            object.__setattr__(self, name, parse_eps(name, getattr(self, name)))
        object.__setattr__(self, "post_multiplier", parse_number("post_multiplier", self.post_multiplier))
        check_positive("sinkhorn_repeat", self.sinkhorn_repeat)

    @property
    def num_streams(self) -> int:
        return count_streams(self.weight.shape[0])

    @property
    def hidden(self) -> int:
        return self.weight.shape[1] // self.num_streams


@dataclass(frozen=True, eq=False)
class Mixing:
    """What the kernels are given of Gates and of a norm, or of a head, which has neither terms nor a norm.

    numbers: the constants of Gates and of the norm by their names in the kernels.
    """

    weight: Tensor
    terms: Tensor | None
    scale: Tensor
    base: Tensor
    norm_weight: Tensor | None
    numbers: dict[str, float]


def prepare_gates(
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    rms_eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_multiplier: float = 2.0,
    sinkhorn_repeat: int = 20,
    has_terms: bool = True,
) -> Gates:
    """Return the Gates of a checkpoint's parameters, which may be fp32, bf16 or fp16: they are cast to fp32 here.

    has_terms: whether the weight is split into terms, too, which takes longer than they save in one call; they don't
    follow when the weight changes. Other arguments and errors are those of Gates.
    """
    parameters = {"weight": weight, "scale": scale, "base": base}
    for name, tensor in parameters.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in ACTIVATIONS:
            raise TypeError(f"{name}: expected torch.float32 or torch.bfloat16 or torch.float16, got {tensor.dtype}")
        check_no_gradient(name, tensor)
        parameters[name] = tensor.detach().float().contiguous()
    gates = Gates(
        **parameters,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        post_multiplier=post_multiplier,
        sinkhorn_repeat=sinkhorn_repeat,
    )
    if has_terms:
        # Not in the constructor, nor kept by `replace`: they belong to this weight.
        object.__setattr__(gates, "terms", split_weight(gates.weight, gates.num_streams**2))
    return gates


def split_weight(weight: Tensor, num_comb: int) -> Tensor:
    """Return `[3, columns, K]` bf16 whose sum is weight `[rows, K]`, the last `num_comb` rows first, zeros behind."""
    rest = weight.new_zeros(count_columns(len(weight)), weight.shape[1])
    rest[: len(weight)] = weight.roll(num_comb, 0)
    terms = []
    for _ in range(NUM_TERMS):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return torch.stack(terms)


def count_columns(rows: int) -> int:
    """Return the columns of the products with a weight of so many rows: one for the squares, and a power of two."""
    return max(LEAST_COLUMNS, 1 << rows.bit_length())


def count_streams(rows: int) -> int:
    """Return S of a weight of S * (2 + S) rows.

    Raises:
        ValueError: there is none of 1..8.
    """
    streams = math.isqrt(rows + 1) - 1
    if not 1 <= streams <= MAX_STREAMS or streams * (streams + 2) != rows:
        raise ValueError(f"weight: expected S * (2 + S) rows for S = 1..{MAX_STREAMS} streams, got {rows}")
    return streams
