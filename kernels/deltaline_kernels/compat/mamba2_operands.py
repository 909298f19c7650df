"""The tokens that engines pass to the selective state update, checked and packed as the native operation has them.

Knows shapes, dtypes and strides. Does not know what rows hold, nor where states are.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import check_operand
from deltaline_kernels.compat.operands import pack_gate, share_columns, widen
from deltaline_kernels.mamba2.cpu import mamba2_cpu
from deltaline_kernels.mamba2.heads import Heads
from deltaline_kernels.rows import Rows


@dataclass(frozen=True, eq=False)
class MambaOperands:
    """Packed tokens, their time steps and the heads' weights.

    Args:
        xBC: `[T, H*P + 2*G*S]`, any row stride. dt: `[T, H]` of xBC's dtype or fp32, any row stride.
        A: `[H]`, the rate of the decay. D, dt_bias: `[H]` or None. All of xBC's dtype or fp32.
        softplus: whether the time step is the softplus of dt + dt_bias, or that itself.
        y: outputs `[T, H, P]` of any dtype, contiguous, or None for new ones of xBC's dtype.
    """

    xBC: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    heads: Heads
    softplus: bool
    y: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.xBC.shape[0]

    @property
    def device(self) -> torch.device:
        return self.xBC.device

    @property
    def record(self) -> int:
        """Values of one draft token."""
        return self.heads.record

    def empty_output(self) -> Tensor:
        """Return an output `[T, H, P]` without contents."""
        if self.y is not None:
            return self.y
        size = (self.num_tokens, self.heads.num_heads, self.heads.head_dim)
        return torch.empty(size, dtype=self.xBC.dtype, device=self.device)

    def column(self, t: int, length: int) -> "MambaOperands":
        """Return token t of each of the rows of `length` tokens as views; their outputs have the dtype of y."""
        xBC, dt = (x.unflatten(0, (-1, length))[:, t] for x in (self.xBC, self.dt))
        y = None if self.y is None else torch.empty_like(self.y[: xBC.shape[0]])
        return replace(self, xBC=xBC, dt=dt, y=y)

    def gather(self, index: Tensor) -> "MambaOperands":
        """Return the tokens `index`, in that order, as copies; their outputs have the dtype of y."""
        xBC, dt = (x.index_select(0, index) for x in (self.xBC, self.dt))
        y = None if self.y is None else self.y.new_empty((index.shape[0], *self.y.shape[1:]))
        return replace(self, xBC=xBC, dt=dt, y=y)

    def compute(self, state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        """Run the recurrence on the CPU; return y `[T, H, P]`; mutates `state`."""
        y, A = self.empty_output(), self.A.float()
        weights = (A, self.D, self.dt_bias)
        mamba2_cpu(self.xBC, self.dt, *weights, state, drafts, rows, y, self.heads, softplus=self.softplus)
        return y

    def launch(self, state: Tensor, drafts: Tensor, rows: Rows, o: Tensor, line_shift: int) -> None:
        """Launch the recurrence on a GPU, where line i of `rows` is line i - line_shift; mutates `state` and o."""
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.mamba2.launch import mamba2_triton

        mamba2_triton(
            self.xBC,
            self.dt,
            self.A,
            self.D,
            self.dt_bias,
            state,
            drafts,
            rows,
            o,
            self.heads,
            log_rate=False,
            softplus=self.softplus,
            line_shift=line_shift,
        )


def pack_mamba(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, *, softplus: bool
) -> MambaOperands:
    """Check and pack x and dt `[batch, nheads, dim]`, A `[nheads, dim, dstate]`, B and C `[batch, ngroups, dstate]`.

    x, B and C that are the columns of one tensor, in this order, are used where they are; others are copied.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_operand("x", x, {"batch": None, "nheads": None, "dim": None})
    device, (batch, num_heads, head_dim) = x.device, x.shape
    check_operand("A", A, {"nheads": num_heads, "dim": head_dim, "dstate": None}, device=device)
    state_dim = A.shape[2]
    check_operand("B", B, {"batch": batch, "ngroups": None, "dstate": state_dim}, (x.dtype,), device)
    num_groups = B.shape[1]
    check_operand("C", C, {"batch": batch, "ngroups": num_groups, "dstate": state_dim}, (x.dtype,), device)
    if num_groups < 1 or num_heads < 1 or num_heads % num_groups:
        raise ValueError(f"x: expected a multiple of the {num_groups} groups of B, got {num_heads} heads")
    for name, dim, size in (("x", "dim", head_dim), ("A", "dstate", state_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected {dim} of 1..{MAX_HEAD_DIM}, got {size}")
    check_operand("dt", dt, {"batch": batch, "nheads": num_heads, "dim": head_dim}, device=device)
    _check_tied("dt", dt, 1)
    _check_tied("A", A, 2)
    bias = None if dt_bias is None else pack_head_values("dt_bias", dt_bias, x)
    heads = Heads(num_groups, num_heads, head_dim, state_dim)
    parts = (x, B, C)
    xBC = share_columns(*(part.unsqueeze(1) for part in parts))
    if xBC is None:
        xBC = torch.cat([part.reshape(batch, part.shape[1] * part.shape[2]) for part in parts], dim=1)
    steps = pack_gate(dt[:, :, 0], batch, num_heads, x.dtype)
    return MambaOperands(xBC, steps, _values(A[:, 0, 0], x), None, bias, heads, softplus)


def pack_head_values(name: str, values: Tensor, x: Tensor) -> Tensor:
    """Check `(nheads, dim)` values that are the same for all of a head; return one for each, contiguous."""
    check_operand(name, values, {"nheads": x.shape[1], "dim": x.shape[2]}, ACTIVATIONS, x.device)
    _check_tied(name, values, 1)
    return _values(values[:, 0], x)


def _check_tied(name: str, values: Tensor, dims: int) -> None:
    """Raise ValueError unless the last `dims` dimensions are expanded from one value."""
    sizes, strides = values.shape[-dims:], values.stride()[-dims:]
    if any(size > 1 and stride != 0 for size, stride in zip(sizes, strides, strict=True)):
        raise ValueError(
            f"{name}: expected one value per head, expanded over the rest as Mamba2 layers have it, got strides "
            f"{values.stride()}"
        )


def _values(values: Tensor, x: Tensor) -> Tensor:
    return widen(values, x.dtype).contiguous()
