"""Attention of packed rows over pages of keys: decode, verify and prefill, with modifiers of scores and masks."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention.blocks import BlockLists
from deltaline_kernels.attention.cpu import flex_decode_cpu
from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.modifiers.modifier import Mask, Modifier, Part, and_masks, or_masks
from deltaline_kernels.attention.modifiers.packed import Modifiers
from deltaline_kernels.attention.modifiers.shipped import find_modifier, known_modifiers
from deltaline_kernels.attention.plan import AttentionHeads
from deltaline_kernels.attention.reference import flex_decode_reference
from deltaline_kernels.checks import (
    ACTIVATIONS,
    MAX_BEHIND_LATENT,
    MAX_HEAD_DIM,
    MAX_LATENT_DIM,
    check_tensor,
    parse_number,
)
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import Rows, check_rows

__all__ = [
    "BlockLists",
    "Mask",
    "Modifier",
    "Modifiers",
    "Part",
    "and_masks",
    "find_modifier",
    "flex_decode",
    "flex_decode_reference",
    "known_modifiers",
    "or_masks",
]

# Keys of a page.
MIN_PAGE, MAX_PAGE = 16, 4096


def _fake(
    q: Tensor, v_pages: Tensor | None, value_dim: int | None, return_lse: bool, **_: Any
) -> Tensor | tuple[Tensor, Tensor]:
    size = value_dim if v_pages is None else v_pages.shape[3]
    assert size is not None
    o = q.new_empty(*q.shape[:2], size)
    return (o, q.new_empty(q.shape[:2], dtype=torch.float32)) if return_lse else o


# Modifiers and lists of blocks are objects that an operator can't take.
@operator(_fake, results=2, only={"modifiers": NoneType, "blocks": NoneType})
def flex_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    page_table: Tensor,
    rows: Rows,
    *,
    modifiers: Modifiers | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    return_lse: bool = False,
    blocks: BlockLists | None = None,
    value_dim: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Let every row's tokens attend to its keys, those of its own tokens among them.

    A row's keys are the positions 0 .. position + n - 1 of its write line: they are stored before. A row that writes
    nothing (write line -1) is skipped. What lies behind a row's keys in its pages is never looked at.

    Args:
        q: `[T, HQ, D]` fp32, bf16 or fp16; any stride of tokens and of heads.
        k_pages: `[pages, page_size, HKV, D]` in q.dtype, page_size 16, 32, 64 .. 4096; head h of q uses head
            h // (HQ / HKV).
        v_pages: `[pages, page_size, HKV, DV]` likewise; or None, of latents: the values are the first value_dim = DV
            channels of the keys, D up to 512 and 128 more.
        page_table: `[L, max_pages]` int32, a row stride is fine: the page of key j of line l is
            page_table[l, j // page_size]. Lines may share pages.
        modifiers: None: every query sees every key of its row; causality is a modifier. b is the write line, positions
            are absolute.
        scale: of the products; None: D ** -0.5.
        sinks: `[HQ]` fp32: a logit of each head that takes part in the softmax and has no value.
        gate: `[T, HQ, DV]` in q.dtype, any stride of tokens and of heads: the outputs are multiplied with its sigmoid.
        blocks: lists of the blocks of keys that are looked at, by line, head and block of the row's own tokens; in
            whole ones the mask is not asked. None: all keys that the mask may leave.
        value_dim: DV where v_pages is None; None where it is not.
        return_lse: return the natural logarithm of each softmax's sum, the sink's part included.

    Returns:
        o `[T, HQ, DV]` in q.dtype; with return_lse also lse `[T, HQ]` fp32. Where no key is seen, and in skipped rows,
        o is 0 and lse -inf (the sink where there is one; in skipped rows -inf). Unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    heads = _check(q, k_pages, v_pages, page_table, rows, scale, sinks, gate, value_dim)
    if blocks is not None:
        blocks.check(heads.num_queries, page_table.shape[0], q.device)
    modifiers = Modifiers(device=q.device) if modifiers is None else modifiers
    if not isinstance(modifiers, Modifiers):
        raise TypeError(f"modifiers: expected Modifiers, got {type(modifiers).__name__}")
    modifiers.check(heads.num_queries, page_table.shape[0], q.device)
    o = torch.empty(*q.shape[:2], heads.value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    queries = Queries(q, heads, modifiers, sinks, gate, blocks)
    keys = Keys(k_pages, v_pages, page_table, k_pages.shape[1], page_table.shape[1] * k_pages.shape[1])
    if q.device.type == "cpu":
        flex_decode_cpu(queries, keys, rows, o, lse)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.attention.launch import flex_decode_triton

        flex_decode_triton(queries, keys, rows, o, lse)
    return o if lse is None else (o, lse)


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    page_table: Tensor,
    rows: Rows,
    scale: float | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    value_dim: int | None,
) -> AttentionHeads:
    for name, value, kind in (("q", q, Tensor), ("k_pages", k_pages, Tensor)):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    if q.dtype not in ACTIVATIONS:
        raise TypeError(f"q: expected torch.float32, torch.bfloat16 or torch.float16, got {q.dtype}")
    if q.ndim != 3 or q.stride(2) != 1:
        raise ValueError(f"q: expected [T, HQ, D] with D contiguous, got {list(q.shape)}, strides {q.stride()}")
    device, (num_tokens, num_queries, key_dim) = q.device, q.shape
    check_tensor("k_pages", k_pages, (None, None, None, key_dim), (q.dtype,), device)
    _, page_size, num_keys, _ = k_pages.shape
    if num_keys < 1 or num_queries < 1 or num_queries % num_keys:
        raise ValueError(f"q: expected a multiple of the {num_keys} heads of k_pages, got {num_queries}")
    if not MIN_PAGE <= page_size <= MAX_PAGE or page_size & (page_size - 1):
        raise ValueError(f"k_pages: expected pages of 16, 32, 64 .. {MAX_PAGE} keys, got {page_size}")
    is_latent, value_dim = v_pages is None, _check_values(k_pages, v_pages, value_dim)
    check_tensor("page_table", page_table, (None, None), (torch.int32,), device, row_stride=True)
    if page_table.shape[0] < 1 or page_table.shape[1] < 1:
        raise ValueError(f"page_table: expected at least one line and page, got {list(page_table.shape)}")
    if sinks is not None:
        check_tensor("sinks", sinks, (num_queries,), (torch.float32,), device)
    if gate is not None:
        if not isinstance(gate, Tensor) or gate.dtype != q.dtype or gate.device != device:
            raise TypeError(f"gate: expected a tensor of {q.dtype} on {device}")
        if gate.shape != (num_tokens, num_queries, value_dim) or gate.stride(2) != 1:
            raise ValueError(
                f"gate: expected [{num_tokens}, {num_queries}, {value_dim}] with the last dimension contiguous, got "
                f"{list(gate.shape)}, strides {gate.stride()}"
            )
    check_rows(rows, device)
    scale = key_dim**-0.5 if scale is None else parse_number("scale", scale)
    return AttentionHeads(num_queries, num_keys, key_dim, value_dim, scale, is_latent)


def _check_values(k_pages: Tensor, v_pages: Tensor | None, value_dim: int | None) -> int:
    """Check values, and the sizes of keys and values, which are returned."""
    pages, page_size, num_keys, key_dim = k_pages.shape
    if v_pages is not None:
        check_tensor("v_pages", v_pages, (pages, page_size, num_keys, None), (k_pages.dtype,), k_pages.device)
        if value_dim is not None:
            raise ValueError(f"value_dim: expected None beside v_pages, got {value_dim}")
        for name, size in (("k_pages", key_dim), ("v_pages", v_pages.shape[3])):
            if not 1 <= size <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: expected a head size of 1..{MAX_HEAD_DIM}, got {size}")
        return v_pages.shape[3]
    if not isinstance(value_dim, int) or isinstance(value_dim, bool):
        raise TypeError(f"value_dim: expected an integer where v_pages is None, got {type(value_dim).__name__}")
    most = min(key_dim, MAX_LATENT_DIM)
    if not 1 <= value_dim <= most:
        raise ValueError(f"value_dim: expected 1..{most} of the {key_dim} channels of k_pages, got {value_dim}")
    if key_dim - value_dim > MAX_BEHIND_LATENT:
        raise ValueError(f"k_pages: expected at most {value_dim} + {MAX_BEHIND_LATENT} channels, got {key_dim}")
    return value_dim
