"""Modifiers inside a kernel: their parameters, the scores that they change, the keys that they leave."""

import triton
import triton.language as tl

from deltaline_kernels.attention.modifiers.spec import (
    flat_index,
    has_parameter,
    has_range,
    leaf_function,
    leaf_is_float,
    leaf_is_table,
    leaf_offset,
    leaf_per,
    leaf_range,
    leaf_width,
    mask_leaf,
    num_clauses,
    num_parts,
    num_scores,
    range_heads,
    score_leaf,
)


@triton.jit
def load_parameter(parameters, b, h, LEAF: tl.constexpr):
    """Return the parameter of a leaf for rows b and heads h: its value, or where its table begins; 0 if it has none."""
    if has_parameter(LEAF):
        pointer = parameters + leaf_offset(LEAF)
        if leaf_per(LEAF) == "head":
            pointer += h * leaf_width(LEAF)
        elif leaf_per(LEAF) == "sequence":
            pointer += b.to(tl.int64) * leaf_width(LEAF)
        if leaf_is_float(LEAF):
            pointer = pointer.to(tl.pointer_type(tl.float32), bitcast=True)
        if leaf_is_table(LEAF):
            return pointer
        else:
            return tl.load(pointer)
    else:
        return 0


@triton.jit
def load_scores(parameters, b, h, SPEC: tl.constexpr):
    """Return the parameters of the score modifiers."""
    found = ()
    for i in tl.static_range(num_scores(SPEC)):
        found = found + (load_parameter(parameters, b, h, score_leaf(SPEC, i)),)
    return found


@triton.jit
def load_masks(parameters, b, h, SPEC: tl.constexpr):
    """Return the parameters of the parts of all clauses."""
    found = ()
    for i in tl.static_range(num_clauses(SPEC)):
        for j in tl.static_range(num_parts(SPEC, i)):
            found = found + (load_parameter(parameters, b, h, mask_leaf(SPEC, i, j)),)
    return found


@triton.jit
def modify(scores, found, b, h, q, kv, SPEC: tl.constexpr):
    """Return the modified scores; `found` as of `load_scores`."""
    for i in tl.static_range(num_scores(SPEC)):
        scores = leaf_function(score_leaf(SPEC, i))(scores, b, h, q, kv, found[i], leaf_width(score_leaf(SPEC, i)))
    return scores


@triton.jit
def _sees(p, b, h, q, kv, LEAF: tl.constexpr):
    return leaf_function(LEAF)(b, h, q, kv, p, leaf_width(LEAF))


@triton.jit
def _cut(begin, end, parameters, b, h, first, last, LEAF: tl.constexpr):
    """Return what a leaf leaves of the keys begin..end."""
    if has_range(LEAF):
        p = load_parameter(parameters, b, h, LEAF)
        least, behind = leaf_range(LEAF)(first, last, p, leaf_width(LEAF))
        begin = tl.maximum(begin, least)
        end = tl.minimum(end, behind)
    return begin, end


@triton.jit
def sees(found, b, h, q, kv, SPEC: tl.constexpr):
    """Return whether q sees kv, of a tile and a mask of one clause or more; `found` as of `load_masks`."""
    seen = False
    for i in tl.static_range(num_clauses(SPEC)):
        joined = True
        for j in tl.static_range(num_parts(SPEC, i)):
            one = _sees(found[flat_index(SPEC, i, j)], b, h, q, kv, mask_leaf(SPEC, i, j))
            joined = one if j == 0 else joined & one
        seen = joined if i == 0 else seen | joined
    return seen


@triton.jit
def find_range(parameters, b, first, last, num_keys, HQ: tl.constexpr, SPEC: tl.constexpr):
    """Return the first key that queries first..last of rows b may see, and the one behind the last.

    All are `[rows, 1]`, and so is what is returned. Where nothing is seen, the end is not above the first.
    """
    if num_clauses(SPEC) == 0:
        return 0 * num_keys, num_keys
    else:
        HEADS: tl.constexpr = range_heads(SPEC, HQ)
        h = 0 * num_keys if HEADS == 1 else tl.minimum(tl.arange(0, HEADS), HQ - 1)[None, :]
        low = num_keys + 0 * h
        high = 0 * low
        for i in tl.static_range(num_clauses(SPEC)):
            begin = 0 * low
            end = num_keys + 0 * h
            for j in tl.static_range(num_parts(SPEC, i)):
                begin, end = _cut(begin, end, parameters, b, h, first, last, mask_leaf(SPEC, i, j))
            is_live = begin < end
            low = tl.minimum(low, tl.where(is_live, begin, num_keys))
            high = tl.maximum(high, tl.where(is_live, end, 0))
        return tl.min(low, 1)[:, None], tl.max(high, 1)[:, None]
