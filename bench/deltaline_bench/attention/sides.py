"""Our side of a case of attention, and PyTorch's. Knows no figures and no bars."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.attention.batch import Batch
from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.peers import Peers
from deltaline_kernels import Rows
from deltaline_kernels.attention import Modifiers, and_masks, find_modifier, flex_decode
from deltaline_kernels.compat import flex_decoding


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: pages, and the field's signature over dense keys."""
    return {"deltaline": lambda: _ours(batch), "deltaline compat": lambda: _compat(batch)}


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """PyTorch's own; none of a window, whose dense keys have no room beside the pages."""
    if batch.shape.window is not None:
        return {}
    return {"SDPA": lambda: _sdpa(batch), "flex_attention": lambda: _flex(batch)}


def _rows_of(batch: Batch) -> Rows:
    """Return the rows: tokens of each at the end of its keys."""
    shape = batch.shape
    lengths, lines = [shape.tokens] * shape.num_rows, list(range(1, shape.num_rows + 1))
    zeros = [0] * shape.num_rows
    position = [length - shape.tokens for length in shape.lengths]
    fields = (lengths, lines, lines, lengths, zeros, zeros)
    return Rows.build(*fields, max_short=shape.max_short, device=batch.device, position=position)


def _modifiers_of(batch: Batch) -> Modifiers | None:
    """Return the modifiers that a shape asks for."""
    shape = batch.shape
    masks = [find_modifier("causal")()] if shape.is_causal else []
    if shape.window is not None:
        masks.append(find_modifier("sliding_window")(shape.window))
    scores = [] if shape.soft_cap is None else [find_modifier("soft_cap")(shape.soft_cap)]
    return Modifiers(scores, and_masks(*masks) if masks else None, device=batch.device) if masks or scores else None


def _ours(batch: Batch) -> Side:
    pages = batch.k_pages, batch.v_pages, batch.page_table
    told: dict[str, Any] = {
        "modifiers": _modifiers_of(batch),
        "scale": batch.shape.scale,
        "value_dim": batch.shape.value_dim,
    }
    call = partial(flex_decode, batch.q, *pages, _rows_of(batch), **told)
    return Side(call, lambda o: {"o": o}, lambda: None)


def _compat(batch: Batch) -> Side:
    """Make the call with dense keys of equal length.

    Raises:
        NotApplicable: ragged rows, a window, latents, or several tokens that see each other causally.
    """
    shape = batch.shape
    if shape.is_ragged or shape.window is not None:
        raise NotApplicable("no lengths and no positions")
    if shape.value_dim is not None:
        raise NotApplicable("values are no channels of the keys")
    if shape.is_causal and shape.tokens > 1:
        raise NotApplicable("queries count from 0")
    cap = None if shape.soft_cap is None else find_modifier("soft_cap")(shape.soft_cap)
    call = partial(flex_decoding, *batch.dense(), score_mod=cap, scale=shape.scale)
    return Side(call, lambda o: {"o": _packed(o)}, lambda: None)


def _sdpa(batch: Batch) -> Side:
    """Make PyTorch's scaled_dot_product_attention, of dense keys of equal length, plain or causal from the first key.

    Raises:
        NotApplicable: ragged rows, or modifiers that it does not have.
    """
    shape = batch.shape
    if shape.is_ragged:
        raise NotApplicable("no lengths")
    is_causal = shape.is_causal and shape.tokens > 1
    if shape.soft_cap is not None or (is_causal and shape.tokens < max(shape.lengths)):
        raise NotApplicable("no modifiers")
    q, k, v = batch.dense()

    attend = torch.nn.functional.scaled_dot_product_attention
    call = partial(attend, q, k, v, is_causal=is_causal, scale=shape.scale, enable_gqa=True)
    return Side(call, lambda o: {"o": _packed(o)}, lambda: None)


def _flex(batch: Batch) -> Side:
    """Make PyTorch's flex_attention, compiled, of dense keys; lengths of ragged rows are in its mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = batch.shape
    q, k, v = batch.dense()
    last = torch.tensor(shape.lengths, device=batch.device) - shape.tokens
    cap = shape.soft_cap or 0.0

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, kv: Tensor) -> Tensor:
        return cap * torch.tanh(s / cap)

    def mask(b: Tensor, h: Tensor, i: Tensor, kv: Tensor) -> Tensor:
        return kv <= last[b] + i

    block_mask = None
    if shape.is_causal or shape.is_ragged:
        block_mask = create_block_mask(mask, shape.num_rows, None, shape.tokens, k.shape[2], device=str(batch.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    score_mod = None if shape.soft_cap is None else score
    told: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "scale": shape.scale, "enable_gqa": True}
    call = partial(compiled, q, k, v, **told)
    return Side(call, lambda o: {"o": _packed(o)}, lambda: None)


def _packed(o: Tensor) -> Tensor:
    """Return o `[N, HQ, n, D]` as packed tokens."""
    return o.transpose(1, 2).flatten(0, 1)
