"""What the convolution's kernels are given of a layer and of its tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ConvInputs:
    """Packed tokens, the filter and the lines of their histories, checked by the caller.

    Args:
        x: `[T, D]`, any row stride; rounded to the dtype of `lines` before its use.
        weight: `[W, D]`, any strides. bias: `[D]` or None.
        lines: `[L, columns, D]`, any strides. Mutated by every launch.
        silu: whether an activation follows.
        line_shift: line i of the rows is `lines[i - line_shift]`: with 1, since line 0 of the rows is no history, every
            line of the tensor is in use.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    lines: Tensor
    silu: bool
    line_shift: int = 0
