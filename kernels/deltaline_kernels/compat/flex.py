"""`flex_decoding` with the arguments of PyTorch's flex_attention, for dense tensors.

Modifiers are those of this package or registered ones: a Python function can't be inlined into a compiled kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention import BlockLists, Mask, Modifier, Modifiers, Part, find_modifier, known_modifiers
from deltaline_kernels.attention.cpu import flex_decode_cpu
from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.plan import AttentionHeads
from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM
from deltaline_kernels.compat.arguments import check_flag, check_operand
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import NUM_FIELDS, Rows

# Rows of more queries are not split over their keys: their tiles are enough.
MOST_SHORT = 128

Score = str | Modifier | Part
Layout = tuple[bool, int]


def _fake(query: Tensor, value: Tensor, return_lse: bool, **_: Any) -> Tensor | tuple[Tensor, Tensor]:
    num_rows, heads, length, _size = query.shape
    o = query.new_empty(num_rows, length, heads, value.shape[3]).transpose(1, 2)
    lse = query.new_empty(num_rows, length, heads, dtype=torch.float32).transpose(1, 2)
    return (o, lse) if return_lse else o


# An operator takes the names of modifiers that have no parameter, and neither other objects nor options.
@operator(
    _fake, results=2, only={"score_mod": str, "mask_mod": str, "block_mask": NoneType, "kernel_options": NoneType}
)
def flex_decoding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Score | Sequence[Score] | None = None,
    mask_mod: Score | Mask | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    kernel_options: Mapping[str, Any] | None = None,
    return_lse: bool = False,
    *,
    enable_gqa: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with every query to all keys, as `flex_attention` does; q_idx counts from 0.

    Args:
        query: (B, Hq, M, D). key: (B or 1, Hkv, N, D), value: (B or 1, Hkv, N, DV), all of one dtype. Keys and values
            of both orders of memory, (B, Hkv, N, *) and (B, N, Hkv, *), are used where they are, and so are the first
            N positions of longer ones; others are copied.
        score_mod: a score modifier with its parameter, the name of one that has none, or several, applied in turn.
        mask_mod: a mask likewise, or masks joined by `and_masks`, `or_masks`.
        block_mask: a BlockMask: its lists say which blocks are looked at, and in which of them mask_mod is asked. Its
            own mask_mod is a Python function: pass the modifier that means the same.
        scale: None: D ** -0.5.
        kernel_options: accepted and not needed.
        enable_gqa: False: refuse fewer heads of keys than of queries; they are shared otherwise.

    Returns:
        (B, Hq, M, DV); with return_lse also the natural logarithms of the sums, (B, Hq, M) fp32. Queries that see
        nothing have 0 and -inf.

    Raises:
        TypeError: a Python function as a modifier; the message lists those that there are. Other TypeErrors and
            ValueErrors name the argument, what was expected and what was got.
    """
    heads, num_rows, length, num_keys = _check(query, key, value, scale, kernel_options)
    if enable_gqa is not None:
        check_flag("enable_gqa", enable_gqa)
        if not enable_gqa and heads.num_queries != heads.num_keys:
            raise ValueError(
                f"enable_gqa: expected True, as query has {heads.num_queries} heads and key {heads.num_keys}, got False"
            )
    device = query.device
    scores: Sequence[object] = () if score_mod is None else (score_mod,)
    if isinstance(score_mod, Sequence) and not isinstance(score_mod, str):
        scores = score_mod
    mask = None if mask_mod is None else mask_mod if isinstance(mask_mod, Mask) else _part("mask_mod", mask_mod)
    modifiers = Modifiers([_part("score_mod", score) for score in scores], mask, device=device)
    modifiers.check(heads.num_queries, num_rows, device)
    blocks = None if block_mask is None else _lists(block_mask, mask, num_rows, heads.num_queries, length, num_keys)
    if blocks is not None:
        blocks.check(heads.num_queries, num_rows, device)
    q = query.transpose(1, 2).reshape(num_rows * length, heads.num_queries, heads.key_dim)
    q = q if heads.key_dim == 1 or q.stride(2) == 1 else q.contiguous()
    o = torch.empty(*q.shape[:2], heads.value_dim, dtype=q.dtype, device=device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if return_lse else None
    rows = _rows(num_rows, length, num_keys, device)
    attend = attend_cpu if device.type == "cpu" else attend_triton
    attend(Queries(q, heads, modifiers, blocks=blocks), key, value, rows, o, lse)
    o = o.unflatten(0, (num_rows, length)).transpose(1, 2)
    return o if lse is None else (o, lse.unflatten(0, (num_rows, length)).transpose(1, 2))


def attend_cpu(queries: Queries, key: Tensor, value: Tensor, rows: Rows, o: Tensor, lse: Tensor | None) -> None:
    """Write to o and lse: the keys of a sequence are a page."""
    lines = torch.arange(rows.num_rows, dtype=torch.int32)[:, None]
    table, num_keys = lines * 0 if key.shape[0] == 1 else lines, key.shape[2]
    keys = Keys(key.transpose(1, 2), value.transpose(1, 2), table, num_keys, num_keys)
    flex_decode_cpu(queries, keys, rows, o, lse, from_zero=True)


def attend_triton(queries: Queries, key: Tensor, value: Tensor, rows: Rows, o: Tensor, lse: Tensor | None) -> None:
    """Write to o and lse; keys and values are copied if their order of memory is not one that the kernel knows."""
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.attention.launch import flex_decode_triton

    num_keys = key.shape[2]
    shared = key.shape[0] == 1
    layout = _layout(key)
    if layout is None or layout != _layout(value):
        key, value, layout = key.contiguous(), value.contiguous(), (True, num_keys)
    heads_first, page_size = layout
    flex_decode_triton(queries, Keys(key, value, None, page_size, num_keys, heads_first, shared), rows, o, lse)


def _layout(tensor: Tensor) -> Layout | None:
    """Return whether heads are before keys in memory, and a sequence's room in keys; None: neither order."""
    (lines, heads, keys, size), (line, head, key, value) = tensor.shape, tensor.stride()
    if size > 1 and value != 1:
        return None
    if (key == size or keys == 1) and heads > 1:
        room = head // size
        fits = head == room * size and room >= keys and (lines == 1 or line == head * heads)
        if fits:
            return True, room
    if (head == size or heads == 1) and (key == heads * size or keys == 1):
        room = keys if lines == 1 else line // (heads * size)
        if room >= keys and (lines == 1 or line == room * heads * size):
            return False, room
    return None


def _part(name: str, modifier: object) -> Part:
    """Return a modifier with its parameter for a name, a modifier that has none, or what is one already."""
    if isinstance(modifier, str):
        modifier = find_modifier(modifier)
    if isinstance(modifier, Modifier):
        modifier = modifier()
    kind = name.removesuffix("_mod")
    if not isinstance(modifier, Part) or modifier.modifier.kind != kind:
        got = modifier.modifier.name if isinstance(modifier, Part) else type(modifier).__name__
        raise TypeError(
            f"{name}: expected a {kind} modifier or its name, of {', '.join(known_modifiers())}, or a registered one; "
            f"got {got}"
        )
    return modifier


def _lists(
    block_mask: Any, mask: Part | Mask | None, num_rows: int, num_heads: int, length: int, num_keys: int
) -> BlockLists:
    """Return the lists of a BlockMask."""
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE"):
        if not hasattr(block_mask, name):
            raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    own = getattr(block_mask, "mask_mod", None)
    if mask is None and own is not None and getattr(own, "__name__", "") != "noop_mask":
        raise TypeError(
            "block_mask: its mask_mod is a Python function; pass as mask_mod the modifier that means the same, of "
            f"{', '.join(known_modifiers())}, or a registered one"
        )
    lists = BlockLists.from_mask(block_mask)
    if lists.num_queries * lists.block[0] < length:
        raise ValueError(
            f"block_mask: expected blocks for {length} queries, got {lists.num_queries} of {lists.block[0]}"
        )
    columns = block_mask.kv_indices.shape[-1]
    if columns * lists.block[1] < num_keys:
        raise ValueError(f"block_mask: expected blocks for {num_keys} keys, got {columns} of {lists.block[1]}")
    return lists


def _rows(num_rows: int, length: int, num_keys: int, device: torch.device) -> Rows:
    """Return rows of `length` tokens; made on the device, so that it may be captured."""
    control = torch.zeros(NUM_FIELDS, num_rows + 1, dtype=torch.int32, device=device)
    torch.arange(num_rows + 1, out=control[2])
    torch.mul(control[2], length, out=control[0])
    control[6] = num_keys - length
    return Rows(control, num_rows if length <= MOST_SHORT else 0, MOST_SHORT, length)


def _check(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, kernel_options: object
) -> tuple[AttentionHeads, int, int, int]:
    """Return the sizes: heads, B, M, N."""
    check_operand("query", query, {"B": None, "Hq": None, "M": None, "D": None}, ACTIVATIONS)
    num_rows, num_queries, length, key_dim = query.shape
    device, kinds = query.device, (query.dtype,)
    check_operand("key", key, {"B": None, "Hkv": None, "N": None, "D": key_dim}, kinds, device)
    lines, num_heads, num_keys, _ = key.shape
    check_operand("value", value, {"B": lines, "Hkv": num_heads, "N": num_keys, "DV": None}, kinds, device)
    if lines not in (1, num_rows):
        raise ValueError(f"key: expected a batch of 1 or {num_rows}, got {lines}")
    if num_heads < 1 or num_queries < 1 or num_queries % num_heads:
        raise ValueError(f"query: expected a multiple of the {num_heads} heads of key, got {num_queries}")
    for name, size in (("query", key_dim), ("value", value.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected a head size of 1..{MAX_HEAD_DIM}, got {size}")
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale: expected a number, got {type(scale).__name__}")
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise TypeError(f"kernel_options: expected a mapping, got {type(kernel_options).__name__}")
    scale = float(key_dim**-0.5 if scale is None else scale)
    return AttentionHeads(num_queries, num_heads, key_dim, value.shape[3], scale), num_rows, length, num_keys
