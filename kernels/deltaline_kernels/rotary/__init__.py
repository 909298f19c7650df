"""Queries and keys made ready for attention, and keys and values kept in pages."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM, MAX_LATENT_DIM, check_tensor
from deltaline_kernels.operators import operator
from deltaline_kernels.rotary.cpu import rotate_and_store_cpu
from deltaline_kernels.rotary.reference import rotate_and_store_reference
from deltaline_kernels.rows import Rows, check_rows

__all__ = ["rotate_and_store", "rotate_and_store_reference"]


def _fake(q: Tensor, **_: Any) -> Tensor:
    return q.new_empty(q.shape)


@operator(_fake, mutates=["k_pages", "v_pages"])
def rotate_and_store(
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
) -> Tensor:
    """Normalise and turn the heads of q and k by their positions; keep keys and values in the pages of their rows.

        x        = x / sqrt(mean(x^2) + eps) * norm                     per head of q and k, where a norm is
        x[i]     = x[i] cos_i - x[i + R/2] sin_i                                  i < R/2, cos_i and sin_i of p
        x[i+R/2] = x[i + R/2] cos_i + x[i] sin_i
        k_pages[page, p % page_size], v_pages[same] = k', v;   page = page_table[write_line, p // page_size]

    where p = position + t for token t of a row. As transformers has it for Qwen3-Next, but that a 16-bit value is
    rounded once, at the store.

    Args:
        q: `[T, HQ, D]` fp32, bf16 or fp16, D at most 256. Strides of row and head are free, so that it may be one half
            of what a projection gives per head. HQ is a multiple of HKV.
        k: `[T, HKV, D]`, v: `[T, HKV, DV]`, in q.dtype, DV at most 512; a row stride is fine for both.
        q_norm, k_norm: `[D]` fp32, contiguous: what a head is multiplied with behind its norm (1 + w of a checkpoint
            that keeps w), or None for no norm at all.
        eps: added to the mean square; positive.
        rotary: `[max_positions, R]` fp32, contiguous: cosines of R/2 angles, then their sines. R is even, 2..D.
        k_pages: `[pages, page_size, HKV, D]`, v_pages: `[pages, page_size, HKV, DV]`, in q.dtype: contiguous, or of
            latents views of one contiguous `[pages, page_size, more]` without a value in common. Mutated at the
            positions of the rows' own tokens, and nowhere else.
        page_table: `[L, max_pages]` int32, contiguous; a row's line is its write_line.
        rows: a row without a write line above 0 is skipped, whatever its read line: nothing of it is kept. That its
            pages are its own, and its positions below max_positions and max_pages * page_size, is the caller's promise.

    Returns:
        q' `[T, HQ, D]` in q.dtype, contiguous; zero for the tokens of skipped rows and for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check(q, k, v, rotary, rows)
    eps = _parse_norms(q, q_norm, k_norm, eps)
    _check_pages(k, v, k_pages, v_pages, page_table)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.device.type == "cpu":
        rotate_and_store_cpu(q, k, v, q_norm, k_norm, eps, rotary, k_pages, v_pages, page_table, rows, out)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.rotary.kernel import rotate_and_store_triton

        rotate_and_store_triton(q, k, v, q_norm, k_norm, eps, rotary, k_pages, v_pages, page_table, rows, out)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, rows: Rows) -> None:
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    check_tensor("q", q, (None, None, None), ACTIVATIONS, device, head_stride=True)
    num_tokens, num_heads, dim = q.shape
    check_tensor("k", k, (num_tokens, None, dim), (q.dtype,), device, row_stride=True)
    num_kv_heads = k.shape[1]
    check_tensor("v", v, (num_tokens, num_kv_heads, None), (q.dtype,), device, row_stride=True)
    for name, size, most in (("q", dim, MAX_HEAD_DIM), ("v", v.shape[2], MAX_LATENT_DIM)):
        if not 1 <= size <= most:
            raise ValueError(f"{name}: expected heads of 1..{most} channels, got {size}")
    if num_kv_heads < 1:
        raise ValueError(f"k: expected at least 1 head, got {num_kv_heads}")
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise ValueError(f"q: expected a multiple of {num_kv_heads} heads, got {num_heads}")
    check_tensor("rotary", rotary, (None, None), (torch.float32,), device)
    channels = rotary.shape[1]
    if channels % 2 != 0 or not 2 <= channels <= dim:
        raise ValueError(f"rotary: expected an even number of channels, 2..{dim}, got {channels}")
    check_rows(rows, device)


def _parse_norms(q: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> float:
    """Check the norms, and return what is added to their mean squares."""
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_tensor(name, norm, (q.shape[2],), (torch.float32,), q.device)
    if not isinstance(eps, int | float):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps: expected a positive number, got {eps}")
    return float(eps)


def _check_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor) -> None:
    _check_pool("k_pages", k_pages, (None, None, *k.shape[1:]), k)
    pages, page_size = k_pages.shape[:2]
    if page_size < 1:
        raise ValueError(f"k_pages: expected pages of at least 1 token, got {page_size}")
    _check_pool("v_pages", v_pages, (pages, page_size, *v.shape[1:]), v)
    check_tensor("page_table", page_table, (None, None), (torch.int32,), k.device)


def _check_pool(name: str, pool: Tensor, shape: tuple[int | None, ...], stored: Tensor) -> None:
    """Check pages: contiguous, or of each token as many values of more, that are a stride apart."""
    if isinstance(pool, Tensor) and pool.ndim == 4 and not pool.is_contiguous():
        _, page_size, num_heads, dim = pool.shape
        page, token, head, channel = pool.stride()
        is_packed = channel == 1 and (num_heads == 1 or head == dim) and token >= num_heads * dim
        if is_packed and page == page_size * token:
            # Its shape, dtype and device, as of one without strides.
            pool = pool.as_strided(pool.shape, (page_size * num_heads * dim, num_heads * dim, dim, 1))
    check_tensor(name, pool, shape, (stored.dtype,), stored.device)
