"""The delta rule over packed rows on the CPU: vectorised PyTorch, one step for one token, else chunks of 32.

Within a chunk, with S_ij = g_{j+1} + .. + g_i, G_i = g_1 + .. + g_i and h the state before it:

    T = (I + tril(beta_i exp(S_ij) k_i.k_j, -1))^-1
    U = T beta V - (T beta exp(G) K) h^T
    o = exp(G) Q h^T + tril(exp(S_ij) q_i.k_j) U
    h = exp(G_C) h + U^T (exp(S_Cj) k_j)

With a decay per key channel, exp(S_ij) k_i.k_j is a sum over channels. exp(S_ij) is the product of what i has lost
since a token between them and of what j loses until there, neither of which exceeds 1: so pairs are cut by their last
common block of 2, 4, 8.. tokens, and those of one size are one product, however strong the decays are.

What does not depend on h is computed for a block of chunks at once.
"""

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.decay import decay_between, exp_
from deltaline_kernels.cpu.recurrence import fold_records, run_rows
from deltaline_kernels.cpu.row_groups import RowGroup
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.rows import Rows, StateLines

CHUNK = 32
# Chunks per block: the fastest of 2, 4, 8 and 16 for 16 heads of 64 (2 cores, 1 MiB of L2 each).
BLOCK_CHUNKS = 4


# A log decay below this leaves nothing either, and times 0 it is 0.
LOWEST = -1e4


def delta_rule_cpu(inputs: DeltaInputs, g: Tensor, beta: Tensor, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Validated by the caller.

    Args:
        g: `[T, HV, 1]` fp32, the log decay of a head, or `[T, HV, K]`, those of its key channels.
        beta: `[T, HV]` fp32.
    """
    run_tokens = partial(_run_tokens, (inputs.q, inputs.k, inputs.v, g, beta), inputs.heads, inputs.normalize)
    run_rows(rows, lines, o, partial(fold_records, inputs.heads.num_key_heads), run_tokens)


def _run_tokens(
    packed: tuple[Tensor, ...], heads: DeltaHeads, normalize: bool, group: RowGroup, h: Tensor, out: Tensor
) -> Tensor | None:
    """Run the rows' tokens, `packed` q, k, v, g and beta, as `run_rows` asks for.

    h `[B, HV, V, K]`, out `[B, n, HV, V]`.
    """
    flat = h.flatten(0, 1)
    q, k, v, g, beta = group.tokens_of(*packed)
    if group.length == group.committed == 1:
        _step(flat, q, k, v, g, beta, out, heads, normalize)
        return None
    updates = torch.empty_like(out) if group.committed == 0 and group.writes else None
    _run_chunks(flat, (q, k, v), g, beta, out, updates, heads, normalize, commit=group.committed > 0)
    return None if updates is None else _records(k, updates, g, heads, normalize)


def _records(k: Tensor, u: Tensor, g: Tensor, heads: DeltaHeads, normalize: bool) -> Tensor:
    """Return (k, u, g) of the VERIFY rows' tokens; k `[B, n, H*K]`, u `[B, n, HV, V]`, g `[B, n, HV, 1 or K]`."""
    k = k.float()
    if normalize:
        k = k.unflatten(-1, (heads.num_key_heads, heads.key_dim))
        k = (k * (k * k).sum(-1, keepdim=True).add_(heads.eps).rsqrt_()).flatten(-2)
    return torch.cat((k, u.flatten(-2), g.flatten(-2)), dim=-1)


def _step(
    h: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    heads: DeltaHeads,
    normalize: bool,
) -> None:
    """Advance h `[B*HV, V, K]` by one token per row, `[B, 1, ...]`, in place; write out `[B, 1, HV, V]` fp32."""
    num_rows = v.shape[0]
    kq = torch.empty(num_rows, heads.num_key_heads, 2, heads.key_dim, dtype=torch.float32)
    kq[:, :, 0] = q.view(num_rows, heads.num_key_heads, heads.key_dim)
    kq[:, :, 1] = k.view(num_rows, heads.num_key_heads, heads.key_dim)
    if normalize:
        kq *= (kq * kq).sum(-1, keepdim=True).add_(heads.eps).rsqrt_()
    kq[:, :, 0] *= heads.scale
    if heads.group > 1:
        kq = kq.repeat_interleave(heads.group, dim=1)
    kq = kq.flatten(0, 1)  # (B*HV, 2, K): q, k
    decay = g.flatten(0, 2).exp()[:, None]  # (B*HV, 1, 1 or K)
    v = v.reshape(-1, heads.value_dim)
    # One pass over h serves h q and h k; the decay is applied to q and k.
    products = torch.bmm(kq * decay, h.transpose(1, 2))  # (B*HV, 2, V)
    u = torch.sub(v, products[:, 1]).mul_(beta.reshape(-1, 1))  # (B*HV, V)
    scores = (kq[:, 0] * kq[:, 1]).sum(-1, keepdim=True)
    torch.addcmul(products[:, 0], u, scores, out=out.view(u.shape))
    h.mul_(decay).addcmul_(u[..., None], kq[:, 1:])


def _run_chunks(
    h: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    updates: Tensor | None,
    heads: DeltaHeads,
    normalize: bool,
    *,
    commit: bool,
) -> None:
    """Run rows of n tokens into out and, unless it is None, updates, both `[B, n, HV, V]` fp32.

    Advances h `[B*HV, V, K]` in place if `commit`.
    """
    num_rows, n = out.shape[:2]
    if not commit and n > CHUNK:  # a later chunk reads the state that an earlier one leaves
        h, commit = h.clone(), True
    whole = n - n % CHUNK
    begins = [*range(0, whole, CHUNK * BLOCK_CHUNKS), whole]
    for begin, end in zip(begins, [*begins[1:], n], strict=True):
        if begin == end:
            continue
        split = (-1, min(CHUNK, end - begin))
        q, k, v, chunk_g, chunk_beta = (x[:, begin:end].unflatten(1, split) for x in (*tokens, g, beta))
        # (B, chunks, C, ...) becomes (chunks, B, heads, C, ...)
        shape = (q.shape[1], num_rows, heads.num_key_heads, 2, split[1], heads.key_dim)
        qk = torch.empty(shape, dtype=torch.float32)
        for i, x in enumerate((q, k)):
            qk[:, :, :, i] = x.unflatten(-1, (heads.num_key_heads, heads.key_dim)).permute(1, 0, 3, 2, 4)
        if normalize:
            norms = torch.linalg.vector_norm(qk, dim=-1, keepdim=True).square_().add_(heads.eps).rsqrt_()
        else:
            norms = torch.ones(*qk.shape[:-1], 1, dtype=torch.float32)
        norms[:, :, :, 0] *= heads.scale
        qk = qk.mul_(norms) if heads.group == 1 else (qk * norms).repeat_interleave(heads.group, dim=2)
        v = v.unflatten(-1, (heads.num_value_heads, heads.value_dim))
        v = v.permute(1, 0, 3, 2, 4).float().contiguous()
        chunk_g = chunk_g.permute(1, 0, 3, 2, 4).flatten(1, 2)
        chunk_beta = chunk_beta.permute(1, 0, 3, 2).flatten(1, 2)
        results = _run_block(h, qk.flatten(1, 2), v.flatten(1, 2), chunk_g, chunk_beta, commit=commit)
        for to, result in zip((out, updates), results, strict=True):
            if to is not None:
                to[:, begin:end].unflatten(1, split).copy_(result.unflatten(1, (num_rows, -1)).permute(1, 0, 3, 2, 4))


def _run_block(h: Tensor, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, commit: bool) -> tuple[Tensor, Tensor]:
    """Run chunks in order for X = B*HV heads; return o and u `[chunks, X, C, V]`.

    h `[X, V, K]` (advanced in place if `commit`), qk `[chunks, X, 2, C, K]`, v `[chunks, X, C, V]`, g
    `[chunks, X, C, 1 or K]` and beta `[chunks, X, C]`.
    """
    chunks, heads, _, size, _ = qk.shape
    g, beta = g.flatten(0, 1), beta.flatten(0, 1)  # (chunks*X, C, ...)
    flat = qk.flatten(0, 1)
    products = _products_by_channel(flat, g) if g.shape[2] > 1 else _products_by_head(flat, g[..., 0])
    scores, system = products[:, 0].tril_(), products[:, 1].mul_(beta[..., None])
    identity = torch.eye(size, dtype=torch.float32).expand_as(system)
    solved = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True).mul_(beta[:, None])
    # exp(G) and exp(S_Cj), (chunks*X, C, 1 or K)
    total, rest = exp_(g.cumsum(1)), exp_(F.pad(g[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1))
    q_total, k_total = (flat * total[:, None]).unbind(1)
    u = torch.bmm(solved, v.flatten(0, 1)).unflatten(0, (chunks, heads))
    seen = torch.bmm(solved, k_total).unflatten(0, (chunks, heads))
    q_total, k_rest, last = (x.unflatten(0, (chunks, heads)) for x in (q_total, flat[:, 1] * rest, total[:, -1:]))
    o = torch.empty_like(v)
    for i in range(chunks):
        u[i].baddbmm_(seen[i], h.transpose(1, 2), alpha=-1)
        torch.bmm(q_total[i], h.transpose(1, 2), out=o[i])
        if commit:
            h.mul_(last[i]).baddbmm_(u[i].transpose(1, 2), k_rest[i])
    o.flatten(0, 1).baddbmm_(scores, u.flatten(0, 1))
    return o, u


def _products_by_head(qk: Tensor, g: Tensor) -> Tensor:
    """Return exp(S_ij) q_i.k_j and exp(S_ij) k_i.k_j of qk `[M, 2, C, K]` with g `[M, C]`: `[M, 2, C, C]`.

    Above the diagonal exp(S) is 1; the solver does not read there, the scores are cut.
    """
    size = g.shape[1]
    products = torch.bmm(qk.flatten(1, 2), qk[:, 1].transpose(1, 2))
    return products.view(-1, 2, size, size).mul_(decay_between(g)[:, None])


def _products_by_channel(qk: Tensor, g: Tensor) -> Tensor:
    """Return what `_products_by_head` does, with g `[M, C, K]`; above the diagonal it is 0."""
    size = g.shape[1]
    products = torch.diag_embed((qk * qk[:, 1:]).sum(-1))  # (M, 2, C, C)
    g = g.clamp_min(LOWEST)
    for between, pairs in _levels(size):
        faded = qk * exp_(between @ g)[:, None]
        own = torch.bmm(faded.flatten(1, 2), faded[:, 1].transpose(1, 2)).unflatten(1, (2, size))
        products = torch.where(pairs, own, products)
    return products


@lru_cache
def _levels(size: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each size of half a block, 1, 2, 4.. tokens: which gates are between a token and the middle of its
    block, `[C, C]` fp32, and which pairs of tokens the middle is between, `[C, C]`.
    """
    i, j = torch.arange(size)[:, None], torch.arange(size)[None, :]
    found, half = [], 1
    while half < size:
        same = i // (2 * half) == j // (2 * half)
        is_right, other_right = i & half > 0, j & half > 0
        # Of the right half the gates up to the token's own, of the left one those behind it.
        between = same & (is_right == other_right) & torch.where(is_right, j <= i, j > i)
        found.append((between.float(), same & is_right & ~other_right))
        half *= 2
    return found
