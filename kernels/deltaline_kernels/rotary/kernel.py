"""Norm and rotary embedding, and keys and values kept in pages, in Triton: one launch for rows of any length.

A program has a token and some of its heads: queries, or keys and values. It finds the token's row by itself. Does not
know which rows decode, verify or prefill.

A head's channels come as two halves of each R: channels j and j + R/2 of the g-th R are at place g R/2 + j of either.
So what turns together is in one thread, and loads are as wide as if channels followed each other.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.rows import Rows

# Values of a program's tile of heads: 32 per thread of its one warp, none of which waits for another warp.
BLOCK_VALUES = 1024
NUM_WARPS = 1
ROWS_AT_ONCE = tl.constexpr(64)


@triton.jit
def _find_token(control, control_stride, num_rows, token):
    """Return the line and the position of a packed token; line 0 if no row has it, or one without a line.

    What tells them is loaded for all rows at once, those of a part where they are many: a bisection would wait for one
    load after the other.
    """
    o_row = tl.arange(0, ROWS_AT_ONCE)
    first, count = 0, num_rows
    if num_rows > ROWS_AT_ONCE:
        # A token's row is the last that begins at or before it, hence behind the last such sample.
        count = tl.cdiv(num_rows, ROWS_AT_ONCE)
        sample = o_row * count
        begins = tl.load(control + sample, mask=sample < num_rows, other=0x7FFFFFFF)
        first = tl.maximum(tl.sum((begins <= token).to(tl.int32), 0) - 1, 0) * count
    line, position = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for i in range(first, tl.minimum(first + count, num_rows), ROWS_AT_ONCE):
        row = i + o_row
        inside = row < num_rows
        begin = tl.load(control + row, mask=inside, other=0)
        end = tl.load(control + row + 1, mask=inside, other=0)
        write = tl.load(control + 2 * control_stride + row, mask=inside, other=0)
        before = tl.load(control + 6 * control_stride + row, mask=inside, other=0)
        own = (begin <= token) & (token < end) & (write > 0)
        line += tl.sum(tl.where(own, write, 0), 0)
        position += tl.sum(tl.where(own, before + token - begin, 0), 0)
    return line, position


@triton.jit
def _load_heads(pointer, head, in_tile, o_low, HEAD_STRIDE: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return both halves of heads' channels, `[heads, BLOCK_C]` each, as they come; zero outside."""
    p_low = pointer + head[:, None] * HEAD_STRIDE + o_low[None, :]
    low = tl.load(p_low, mask=in_tile & (o_low < D)[None, :], other=0.0)
    high = tl.load(p_low + R // 2, mask=in_tile & (o_low < D - R // 2)[None, :], other=0.0)
    return low, high


@triton.jit
def _store_heads(pointer, low, high, head, in_tile, o_low, D: tl.constexpr, R: tl.constexpr):
    """Store both halves of heads' channels, rounded to the dtype of what is pointed to."""
    p_low = pointer + head[:, None] * D + o_low[None, :]
    dtype: tl.constexpr = pointer.dtype.element_ty
    tl.store(p_low, low.to(dtype), mask=in_tile & (o_low < D)[None, :])
    tl.store(p_low + R // 2, high.to(dtype), mask=in_tile & (o_low < D - R // 2)[None, :])


@triton.jit
def _load_weight(pointer, o_low, NORM: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return both halves of a norm's weight, `[1, BLOCK_C]` each; nothing of use unless NORM."""
    low = tl.load(pointer + o_low, mask=(o_low < D) & NORM, other=0.0)
    high = tl.load(pointer + o_low + R // 2, mask=(o_low < D - R // 2) & NORM, other=0.0)
    return low[None, :], high[None, :]


@triton.jit
def _turn(low, high, w_low, w_high, angles, o_c, eps, NORM: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Return both halves of heads in fp32, normalised if NORM, and their first R channels turned."""
    turns = o_c < R // 2
    cos = tl.load(angles + o_c, mask=turns, other=0.0)[None, :]
    sin = tl.load(angles + R // 2 + o_c, mask=turns, other=0.0)[None, :]
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / D + eps)[:, None]
        low, high = low * inverse * w_low, high * inverse * w_high
    # Selected, not multiplied by 1 and 0: what does not turn may be infinite.
    turned_low = tl.where(turns[None, :], low * cos - high * sin, low)
    turned_high = tl.where(turns[None, :], high * cos + low * sin, high)
    return turned_low, turned_high


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["control_stride", "num_rows", "max_pages"],
    do_not_specialize_on_alignment=["control", "page_table"],
)
def rotate_kernel(
    q,
    k,
    v,
    q_norm,
    k_norm,
    rotary,
    k_pages,
    v_pages,
    page_table,
    control,
    out,
    control_stride,
    num_rows,
    max_pages,
    eps,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    # Values between tokens of a page.
    K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write some heads of a token: queries to the outputs, or keys and values to their page."""
    PARTS_Q: tl.constexpr = (HQ + BLOCK_Q - 1) // BLOCK_Q
    PARTS: tl.constexpr = PARTS_Q + (HKV + BLOCK_KV - 1) // BLOCK_KV
    i_part = tl.program_id(0) % PARTS
    i_token = tl.program_id(0) // PARTS
    token = i_token.to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    o_low = o_c // (R // 2) * R + o_c % (R // 2)
    # What need not wait for the token's row is asked for first.
    if i_part < PARTS_Q:
        o_q = i_part * BLOCK_Q + tl.arange(0, BLOCK_Q)
        in_q = (o_q < HQ)[:, None]
        p_out = out + token * (HQ * D)
        q_low, q_high = _load_heads(q + token * Q_STRIDE, o_q, in_q, o_low, Q_HEAD_STRIDE, D, R)
        qw_low, qw_high = _load_weight(q_norm, o_low, NORM_Q, D, R)
        line, position = _find_token(control, control_stride, num_rows, i_token)
        if line > 0:
            angles = rotary + position.to(tl.int64) * R
            q_turned, q_other = _turn(q_low, q_high, qw_low, qw_high, angles, o_c, eps, NORM_Q, D, R)
            _store_heads(p_out, q_turned, q_other, o_q, in_q, o_low, D, R)
        else:
            zeros = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
            _store_heads(p_out, zeros, zeros, o_q, in_q, o_low, D, R)
    else:
        o_kv = (i_part - PARTS_Q) * BLOCK_KV + tl.arange(0, BLOCK_KV)
        in_kv = (o_kv < HKV)[:, None]
        o_v = tl.arange(0, BLOCK_V)
        o_value = o_kv[:, None] * DV + o_v[None, :]
        in_value = in_kv & (o_v < DV)[None, :]
        k_low, k_high = _load_heads(k + token * K_STRIDE, o_kv, in_kv, o_low, D, D, R)
        b_v = tl.load(v + token * V_STRIDE + o_value, mask=in_value, other=0.0)
        kw_low, kw_high = _load_weight(k_norm, o_low, NORM_K, D, R)
        line, position = _find_token(control, control_stride, num_rows, i_token)
        if line > 0:
            page = tl.load(page_table + line.to(tl.int64) * max_pages + position // PAGE_SIZE)
            slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
            angles = rotary + position.to(tl.int64) * R
            k_turned, k_other = _turn(k_low, k_high, kw_low, kw_high, angles, o_c, eps, NORM_K, D, R)
            _store_heads(k_pages + slot * K_TOKEN, k_turned, k_other, o_kv, in_kv, o_low, D, R)
            tl.store(v_pages + slot * V_TOKEN + o_value, b_v, mask=in_value)


def _token_stride(pages: Tensor) -> int:
    """Return the values between tokens; where a page has one token alone its stride may say anything."""
    return pages[0, 0].numel() if pages.is_contiguous() else pages.stride(1)


def rotate_and_store_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotary: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    rows: Rows,
    out: Tensor,
) -> None:
    """Write the queries to out `[T, HQ, D]`; mutates `k_pages` and `v_pages`.

    Arguments are validated by `rotate_and_store`. Sizes and strides are constants of the compiled kernel.
    """
    num_tokens, num_heads, dim = q.shape
    _, page_size, num_kv_heads, value_dim = v_pages.shape
    channels = rotary.shape[1]
    block_c = triton.next_power_of_2(triton.cdiv(dim, channels) * (channels // 2))
    block_v = triton.next_power_of_2(value_dim)
    at_once = max(1, BLOCK_VALUES // max(2 * block_c, block_v))
    block_q, block_kv = (min(at_once, triton.next_power_of_2(heads)) for heads in (num_heads, num_kv_heads))
    parts = triton.cdiv(num_heads, block_q) + triton.cdiv(num_kv_heads, block_kv)
    if num_tokens == 0:
        return
    rotate_kernel[(num_tokens * parts,)](
        q,
        k,
        v,
        rotary if q_norm is None else q_norm,
        rotary if k_norm is None else k_norm,
        rotary,
        k_pages,
        v_pages,
        page_table,
        rows.control,
        out,
        rows.control.stride(0),
        rows.num_rows,
        page_table.shape[1],
        eps,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        K_STRIDE=k.stride(0),
        V_STRIDE=v.stride(0),
        K_TOKEN=_token_stride(k_pages),
        V_TOKEN=_token_stride(v_pages),
        HQ=num_heads,
        HKV=num_kv_heads,
        D=dim,
        DV=value_dim,
        R=channels,
        PAGE_SIZE=page_size,
        NORM_Q=q_norm is not None,
        NORM_K=k_norm is not None,
        BLOCK_Q=block_q,
        BLOCK_KV=block_kv,
        BLOCK_C=block_c,
        BLOCK_V=block_v,
        num_warps=NUM_WARPS,
        num_stages=1,
    )
