"""The Mamba2 recurrence over packed rows on the CPU: vectorised PyTorch, one step for one token, else chunks of 64.

Within a chunk, with S_ij = g_{j+1} + .. + g_i, G_i = g_1 + .. + g_i and h the state before it:

    y = exp(G) C h^T + tril(exp(S_ij) C_i.B_j) U + D x
    h = exp(G_C) h + U^T (exp(S_Cj) B_j)

Heads of a group share B and C, so that products with these are one product per group.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.decay import decay_between, exp_
from deltaline_kernels.cpu.elementwise import evenly_
from deltaline_kernels.cpu.recurrence import fold_records, run_rows
from deltaline_kernels.cpu.row_groups import RowGroup
from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs
from deltaline_kernels.rows import Rows, StateLines

CHUNK = 64


def mamba2_cpu(inputs: MambaInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, H, P]`; mutates `lines`. Validated by the caller."""
    dt, dt_bias, rate = inputs.dt, inputs.dt_bias, inputs.rate.float()
    step = dt.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if dt_bias is not None:
        step += dt_bias.float()
    if inputs.softplus:
        evenly_(F.softplus, step).clamp_(*inputs.heads.dt_limit)
    g = step * (-rate.exp() if inputs.log_rate else rate)
    run_tokens = partial(_run_tokens, inputs.xBC, step, g, inputs.D, inputs.heads)
    run_rows(rows, lines, y, partial(fold_records, inputs.heads.num_groups), run_tokens)


def _run_tokens(
    xBC: Tensor, step: Tensor, g: Tensor, D: Tensor | None, heads: MambaHeads, group: RowGroup, h: Tensor, out: Tensor
) -> Tensor | None:
    """Run the rows' tokens as `run_rows` asks for: h `[B, H, P, S]`, out `[B, n, H, P]`."""
    tokens, gates = group.tokens(xBC).float(), group.tokens(g)
    x, B, C = tokens.split((heads.value_channels, heads.key_channels, heads.key_channels), dim=-1)
    x = x.unflatten(-1, (heads.num_heads, heads.head_dim))
    u = x * group.tokens(step)[..., None]
    sizes = (heads.num_groups, heads.state_dim)
    B_groups, C_groups = (part.unflatten(-1, sizes).transpose(1, 2) for part in (B, C))  # (B, G, n, S)
    if group.length == group.committed == 1:
        _step(h, u[:, 0], B_groups, C_groups, gates[:, 0], out[:, 0])
    else:
        if group.committed == 0 and group.length > CHUNK:
            h = h.clone()  # a later chunk reads the state that an earlier one leaves
        for begin in range(0, group.length, CHUNK):
            end = min(begin + CHUNK, group.length)
            commit = group.committed > 0 or end < group.length
            _run_chunk(
                h,
                u[:, begin:end],
                B_groups[:, :, begin:end].flatten(0, 1),
                C_groups[:, :, begin:end].flatten(0, 1),
                gates[:, begin:end],
                out[:, begin:end],
                commit=commit,
            )
    if D is not None:
        out.addcmul_(x, D.float()[:, None])
    if group.committed > 0 or not group.writes:
        return None
    return torch.cat((B, u.flatten(2), gates), dim=-1)


def _step(h: Tensor, u: Tensor, B: Tensor, C: Tensor, g: Tensor, out: Tensor) -> None:
    """Advance h `[B, H, P, S]` by one token per row, in place; write h C to out `[B, H, P]`.

    u `[B, H, P]`, B and C `[B, G, 1, S]`, g `[B, H]`.
    """
    num_rows, num_groups = B.shape[:2]
    B, C = B.flatten(0, 1), C.flatten(0, 1)  # (B*G, 1, S)
    flat = h.view(num_rows * num_groups, -1, h.shape[-1])  # (B*G, R*P, S)
    decay = g.exp()[..., None]  # (B, H, 1)
    # One pass over h as it was; the decay is applied to the products.
    seen = torch.bmm(flat, C.transpose(1, 2)).view(u.shape).mul_(decay)
    scores = (B * C).sum(-1).view(num_rows, num_groups, 1, 1)
    torch.add(seen, (u.unflatten(1, (num_groups, -1)) * scores).flatten(1, 2), out=out)
    h.mul_(decay[..., None])
    flat.addcmul_(u.reshape(len(flat), -1, 1), B)


def _run_chunk(h: Tensor, u: Tensor, B: Tensor, C: Tensor, g: Tensor, out: Tensor, *, commit: bool) -> None:
    """Run at most CHUNK tokens; write h C to out `[B, C, H, P]`; advance h `[B, H, P, S]` in place if `commit`.

    u `[B, C, H, P]`, B and C `[B*G, C, S]`, g `[B, C, H]`.
    """
    num_rows, size, num_heads, head_dim = u.shape
    u = u.transpose(1, 2).flatten(0, 1)  # (B*H, C, P)
    g = g.transpose(1, 2).flatten(0, 1)  # (B*H, C)
    flat = h.view(len(B), -1, h.shape[-1])  # (B*G, R*P, S)
    # Above the diagonal it is 1; the scores are cut there.
    decay = decay_between(g)  # exp(S), (B*H, C, C)
    total = exp_(g.cumsum(1))  # exp(G), (B*H, C)
    scores = torch.bmm(C, B.transpose(1, 2))[:, None]  # (B*G, 1, C, C)
    scores = (decay.unflatten(0, (len(B), -1)) * scores).tril_().flatten(0, 1)  # (B*H, C, C)
    seen = torch.bmm(flat, C.transpose(1, 2)).view(len(u), head_dim, size).transpose(1, 2)  # (B*H, C, P)
    y = torch.baddbmm(seen * total[..., None], scores, u)
    out.copy_(y.unflatten(0, (num_rows, num_heads)).transpose(1, 2))
    if commit:
        left = (u * decay[:, -1, :, None]).transpose(1, 2).reshape(len(B), -1, size)  # (B*G, R*P, C)
        h.mul_(total[:, -1].view(num_rows, num_heads, 1, 1))
        flat.baddbmm_(left, B)
