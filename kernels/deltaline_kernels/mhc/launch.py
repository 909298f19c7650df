"""Order of the kernels of hyper-connections on a GPU: products of the streams, then gates and weighted sums.

Of many tokens some are multiplied and collapsed at a time, which bounds the memory of the sums.
Launches overlap: one may begin when every program of the one before it has begun, and waits for that one where it
needs it. A product waits at its end for the collapse before it, whose partials are not its own; so a collapse, which
begins by waiting for its product, knows that the collapse before that is complete, and of two buffers for partials the
one that is written is read by no one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deltaline_kernels.device.overlap import can_overlap
from deltaline_kernels.device.sizes import find_shared_bytes
from deltaline_kernels.mhc.collapse import launch_collapse
from deltaline_kernels.mhc.gates import Gates, Mixing, count_columns
from deltaline_kernels.mhc.plan import plan_pre
from deltaline_kernels.mhc.post import launch_post
from deltaline_kernels.mhc.product import launch_product

BUFFERS = 2


def mhc_post_triton(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, y: Tensor) -> None:
    """Write y `[N, S, H]`. Arguments are validated by `mhc_post`; there is a token."""
    launch_post(x, residual, post, comb, y, overlap=False)


def mhc_pre_triton(
    residual: Tensor, gates: Gates, norm_weight: Tensor | None, norm_eps: float, y: Tensor, post: Tensor, comb: Tensor
) -> None:
    """Write y `[N, H]`, post `[N, S]` and comb `[N, S, S]`. Arguments are validated by `mhc_pre`; there is a token."""
    _pre(residual, _mixing(gates, norm_weight, norm_eps), y, (post, comb))


def mhc_post_pre_triton(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    gates: Gates,
    norm_weight: Tensor | None,
    norm_eps: float,
    mixed: Tensor,
    y: Tensor,
    new_post: Tensor,
    new_comb: Tensor,
) -> None:
    """Write mixed `[N, S, H]`, y `[N, H]`, new_post and new_comb. Arguments are validated; there is a token."""
    overlap = can_overlap(residual)

    def post_of(own: slice) -> None:
        launch_post(x[own], residual[own], post[own], comb[own], mixed[own], overlap=overlap)

    _pre(mixed, _mixing(gates, norm_weight, norm_eps), y, (new_post, new_comb), before=post_of)


def mhc_head_triton(
    residual: Tensor, weight: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float, y: Tensor
) -> None:
    """Write y `[N, H]`. Arguments are validated by `mhc_head`; there is a token."""
    absent = {"SINKHORN_EPS": 0.0, "MULTIPLIER": 0.0, "REPEAT": 1, "NORM_EPS": 0.0}
    numbers = {"RMS_EPS": rms_eps, "PRE_EPS": pre_eps, **absent}
    _pre(residual, Mixing(weight, None, scale, base, None, numbers), y, None)


def _pre(
    residual: Tensor,
    mixing: Mixing,
    y: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    before: Callable[[slice], None] | None = None,
) -> None:
    """Multiply and collapse: at once, or in chunks of tokens. `before`: writes the residual of a chunk."""
    num_tokens, streams, hidden = residual.shape
    has_norm, shared_bytes = mixing.norm_weight is not None, find_shared_bytes(residual.device)
    plan = plan_pre(num_tokens, streams, hidden, residual.dtype, norm=has_norm, shared_bytes=shared_bytes)
    overlap = can_overlap(residual)
    begins = range(0, num_tokens, plan.chunk)
    buffers = [_empty_partials(plan.splits, min(plan.chunk, num_tokens), mixing.weight) for _ in begins[:BUFFERS]]
    for i, begin in enumerate(begins):
        own = slice(begin, begin + plan.chunk)
        if before is not None:
            before(own)
        part = residual[own]
        partials = _take(buffers[i % BUFFERS], part.shape[0])
        waits = before is not None
        early = overlap and (waits or i > 0)
        launch_product(part, mixing, partials, plan, overlap=overlap, early=early, waits=waits)
        own_gates = None if gates is None else (gates[0][own], gates[1][own])
        launch_collapse(part, partials, mixing, y[own], own_gates, plan, early=len(begins) == 1, overlap=overlap)


def _take(partials: Tensor, num_tokens: int) -> Tensor:
    """Return the memory of partials `[splits, N, columns]` for fewer tokens."""
    splits, _, columns = partials.shape
    return partials.view(-1)[: splits * num_tokens * columns].view(splits, num_tokens, columns)


def _empty_partials(splits: int, num_tokens: int, weight: Tensor) -> Tensor:
    """Return memory `[splits, N, columns]` for sums of products, with a column for the sum of squares."""
    shape = splits, num_tokens, count_columns(weight.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=weight.device)


def _mixing(gates: Gates, norm_weight: Tensor | None, norm_eps: float) -> Mixing:
    numbers = {
        "RMS_EPS": gates.rms_eps,
        "PRE_EPS": gates.pre_eps,
        "SINKHORN_EPS": gates.sinkhorn_eps,
        "MULTIPLIER": gates.post_multiplier,
        "REPEAT": gates.sinkhorn_repeat,
        "NORM_EPS": norm_eps,
    }
    return Mixing(gates.weight, gates.terms, gates.scale, gates.base, norm_weight, numbers)
