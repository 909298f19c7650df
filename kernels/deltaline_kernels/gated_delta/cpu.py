"""The gated delta rule over packed rows on the CPU: vectorised PyTorch, one step for one token, else chunks of 32.

Within a chunk, with S_ij = g_{j+1} + .. + g_i, G_i = g_1 + .. + g_i and h the state before it:

    T = (I + tril(beta_i exp(S_ij) k_i.k_j, -1))^-1
    U = T beta V - (T beta exp(G) K) h^T
    o = exp(G) Q h^T + tril(exp(S_ij) q_i.k_j) U
    h = exp(G_C) h + U^T (exp(S_Cj) k_j)

What does not depend on h is computed for a block of chunks at once.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.decay import decay_between, exp_
from deltaline_kernels.cpu.recurrence import run_rows
from deltaline_kernels.cpu.row_groups import RowGroup
from deltaline_kernels.gated_delta.inputs import DeltaHeads, DeltaInputs
from deltaline_kernels.rows import Rows, StateLines

CHUNK = 32
# Chunks per block: the fastest of 2, 4, 8 and 16 for 16 heads of 64 (2 cores, 1 MiB of L2 each).
BLOCK_CHUNKS = 4


def gated_delta_cpu(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Validated by the caller."""
    a, b, A_log, dt_bias = inputs.a, inputs.b, inputs.A_log, inputs.dt_bias
    if A_log is None or dt_bias is None:
        g, beta = a.float(), b.float()
    else:
        g = F.softplus(a.float() + dt_bias.float()).mul_(A_log.float().exp().neg_())
        beta = b.float().sigmoid_() if b.dtype != torch.float32 else b.sigmoid()
    run_tokens = partial(_run_tokens, (inputs.q, inputs.k, inputs.v, g, beta), inputs.heads, inputs.normalize)
    run_rows(rows, lines, o, inputs.heads.num_key_heads, run_tokens)


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
    """Return (k, u, g) of the VERIFY rows' tokens; k `[B, n, H*K]`, u `[B, n, HV, V]`."""
    k = k.float()
    if normalize:
        k = k.unflatten(-1, (heads.num_key_heads, heads.key_dim))
        k = (k * _inverse_norm(k, heads.eps)).flatten(-2)
    return torch.cat((k, u.flatten(-2), g), dim=-1)


def _inverse_norm(x: Tensor, eps: float) -> Tensor:
    return (x * x).sum(-1, keepdim=True).add_(eps).rsqrt_()


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
        kq *= _inverse_norm(kq, heads.eps)
    kq[:, :, 0] *= heads.scale
    if heads.group > 1:
        kq = kq.repeat_interleave(heads.group, dim=1)
    kq = kq.flatten(0, 1)  # (B*HV, 2, K): q, k
    decay = g.flatten().exp()[:, None]  # (B*HV, 1)
    v = v.reshape(-1, heads.value_dim)
    # One pass over h serves h q and h k; the decay is applied to the products.
    products = torch.bmm(kq, h.transpose(1, 2)) * decay[..., None]  # (B*HV, 2, V)
    u = torch.sub(v, products[:, 1]).mul_(beta.reshape(-1, 1))  # (B*HV, V)
    scores = (kq[:, 0] * kq[:, 1]).sum(-1, keepdim=True)
    torch.addcmul(products[:, 0], u, scores, out=out.view(u.shape))
    h.mul_(decay[..., None]).addcmul_(u[..., None], kq[:, 1:])


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
        chunk_g, chunk_beta = (x.permute(1, 0, 3, 2).flatten(1, 2) for x in (chunk_g, chunk_beta))
        results = _run_block(h, qk.flatten(1, 2), v.flatten(1, 2), chunk_g, chunk_beta, commit=commit)
        for to, result in zip((out, updates), results, strict=True):
            if to is not None:
                to[:, begin:end].unflatten(1, split).copy_(result.unflatten(1, (num_rows, -1)).permute(1, 0, 3, 2, 4))


def _run_block(h: Tensor, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, commit: bool) -> tuple[Tensor, Tensor]:
    """Run chunks in order for X = B*HV heads; return o and u `[chunks, X, C, V]`.

    h `[X, V, K]` (advanced in place if `commit`), qk `[chunks, X, 2, C, K]`, v `[chunks, X, C, V]`, g and beta
    `[chunks, X, C]`.
    """
    chunks, heads, _, size, _ = qk.shape
    g, beta = g.flatten(0, 1), beta.flatten(0, 1)  # (chunks*X, C)
    # Above the diagonal exp(S) is 1; the solver does not read there, the scores are cut.
    decay = decay_between(g)  # exp(S), (chunks*X, C, C)
    total = exp_(g.cumsum(1))  # exp(G), (chunks*X, C)
    k = qk[:, :, 1]
    flat_k = k.flatten(0, 1)
    products = torch.bmm(qk.flatten(2, 3).flatten(0, 1), flat_k.transpose(1, 2)).unflatten(1, (2, size))
    products.mul_(decay[:, None])
    scores, system = products[:, 0].tril_(), products[:, 1].mul_(beta[..., None])
    identity = torch.eye(size, dtype=torch.float32).expand_as(system)
    solved = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True).mul_(beta[:, None])
    u = torch.bmm(solved, v.flatten(0, 1)).unflatten(0, (chunks, heads))
    seen = torch.bmm(solved.mul_(total[:, None]), flat_k).unflatten(0, (chunks, heads))
    rest, last = (x.unflatten(0, (chunks, heads))[..., None] for x in (decay[:, -1], total[:, -1:]))
    o = torch.empty_like(v)
    for i in range(chunks):
        u[i].baddbmm_(seen[i], h.transpose(1, 2), alpha=-1)
        torch.bmm(qk[i, :, 0], h.transpose(1, 2), out=o[i])
        if commit:
            h.mul_(last[i]).baddbmm_((u[i] * rest[i]).transpose(1, 2), k[i])
    o.flatten(0, 1).mul_(total[..., None]).baddbmm_(scores, u.flatten(0, 1))
    return o, u
