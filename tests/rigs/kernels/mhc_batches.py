"""Streams and gates for the tests of hyper-connections, and the ways they run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import (
    Gates,
    mhc_head,
    mhc_head_reference,
    mhc_post,
    mhc_post_pre,
    mhc_post_pre_reference,
    mhc_post_reference,
    mhc_pre,
    mhc_pre_reference,
    prepare_gates,
)

FP32 = torch.float32


@dataclass(frozen=True)
class Streams:
    """What an operation is given: x `[N, H]`, residual `[N, S, H]`, post, comb, gates and a norm's weight `[H]`."""

    x: Tensor
    residual: Tensor
    post: Tensor
    comb: Tensor
    gates: Gates
    norm: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.residual.dtype

    def take(self, own: slice | Tensor) -> Streams:
        """Return some of the tokens."""
        parts = {name: getattr(self, name)[own] for name in ("x", "residual", "post", "comb")}
        return replace(self, **parts)

    def exact(self) -> Streams:
        """Return the same in fp64, for the references."""
        return replace(self, x=self.x.double(), residual=self.residual.double())


def make_streams(num_tokens: int, streams: int, hidden: int, path: Path, seed: int = 0, spread: float = 1.0) -> Streams:
    """Make random ones; `spread` is how far the products of a token are from 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    rows, inputs = streams * (2 + streams), streams * hidden
    gates = prepare_gates(
        (normal(rows, inputs) * spread * inputs**-0.5).to(path.device),
        (1 + 0.3 * normal(3)).to(path.device),
        normal(rows).to(path.device),
    )
    return Streams(
        normal(num_tokens, hidden).to(path.device, path.dtype),
        normal(num_tokens, streams, hidden).to(path.device, path.dtype),
        2 * torch.sigmoid(normal(num_tokens, streams)).to(path.device),
        torch.softmax(normal(num_tokens, streams, streams), -1).to(path.device),
        gates,
        (1 + 0.3 * normal(hidden)).to(path.device),
    )


def nans(*size: int, dtype: torch.dtype = FP32) -> Tensor:
    """Return memory on the CPU that shows what is not written."""
    return torch.full(size, torch.nan, dtype=dtype)


def run_pre(path: Path, given: Streams, norm: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    residual = given.residual
    n, streams, hidden = residual.shape
    if not isinstance(path, InterpretedPath) or n == 0:
        return mhc_pre(residual, given.gates, norm_weight=norm)
    from deltaline_kernels.mhc.launch import mhc_pre_triton

    y, post, comb = nans(n, hidden, dtype=given.dtype), nans(n, streams), nans(n, streams, streams)
    mhc_pre_triton(residual, given.gates, norm, 1e-6, y, post, comb)
    return y, post, comb


def run_post(path: Path, given: Streams) -> Tensor:
    if not isinstance(path, InterpretedPath) or given.x.shape[0] == 0:
        return mhc_post(given.x, given.residual, given.post, given.comb)
    from deltaline_kernels.mhc.launch import mhc_post_triton

    y = nans(*given.residual.shape, dtype=given.dtype)
    mhc_post_triton(given.x, given.residual, given.post, given.comb, y)
    return y


def run_post_pre(path: Path, given: Streams, norm: Tensor | None = None) -> tuple[Tensor, ...]:
    n, streams, hidden = given.residual.shape
    own = given.x, given.residual, given.post, given.comb, given.gates
    if not isinstance(path, InterpretedPath) or n == 0:
        return mhc_post_pre(*own, norm_weight=norm)
    from deltaline_kernels.mhc.launch import mhc_post_pre_triton

    mixed, y = nans(n, streams, hidden, dtype=given.dtype), nans(n, hidden, dtype=given.dtype)
    post, comb = nans(n, streams), nans(n, streams, streams)
    mhc_post_pre_triton(*own, norm, 1e-6, mixed, y, post, comb)
    return mixed, y, post, comb


def run_head(path: Path, given: Streams) -> Tensor:
    n, streams, hidden = given.residual.shape
    own = given.gates.weight[:streams], given.gates.scale[:1], given.gates.base[:streams]
    if not isinstance(path, InterpretedPath) or n == 0:
        return mhc_head(given.residual, *own)
    from deltaline_kernels.mhc.launch import mhc_head_triton

    y = nans(n, hidden, dtype=given.dtype)
    mhc_head_triton(given.residual, *own, 1e-6, 1e-6, y)
    return y


def check_pre(got: tuple[Tensor, ...], given: Streams, norm: Tensor | None = None) -> None:
    """Compare with the reference in fp64: gates are those of fp32 whatever the streams' dtype."""
    want = mhc_pre_reference(given.exact().residual, given.gates, norm_weight=norm)
    for name, one, other, dtype in zip(("y", "post", "comb"), got, want, (given.dtype, FP32, FP32), strict=True):
        assert one.dtype == dtype
        assert_close(name, one, other, dtype)


def check_post(got: Tensor, given: Streams) -> None:
    exact = given.exact()
    want = mhc_post_reference(exact.x, exact.residual, given.post, given.comb)
    assert got.dtype == given.dtype and got.is_contiguous()
    assert_close("residual", got, want, given.dtype)


def check_post_pre(got: tuple[Tensor, ...], given: Streams, norm: Tensor | None = None) -> None:
    """The gates are those of the streams as they are stored."""
    check_post(got[0], given)
    check_pre(got[1:], replace(given, residual=got[0]), norm)


def check_head(got: Tensor, given: Streams) -> None:
    streams, gates = given.residual.shape[1], given.gates
    want = mhc_head_reference(given.exact().residual, gates.weight[:streams], gates.scale[:1], gates.base[:streams])
    assert got.dtype == given.dtype
    assert_close("y", got, want, given.dtype)


def reference_of_both(given: Streams) -> tuple[Tensor, ...]:
    """Return the reference of `mhc_post_pre` in the dtype of the streams."""
    return mhc_post_pre_reference(given.x, given.residual, given.post, given.comb, given.gates)
