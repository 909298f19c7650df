"""The modifiers of this package, and how one is found by its name.

Others are registered as entry points of the group "deltaline.modifiers", each of which names a `Modifier`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention.modifiers.modifier import Modifier

GROUP = "deltaline.modifiers"
_KERNELS = "deltaline_kernels.attention.modifiers.inlined:"

Lookup = Callable[[Tensor], Tensor]


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: None) -> Tensor:
    return kv <= q


def _sliding_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Tensor) -> Tensor:
    return q - kv < p


def _prefix_lm(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Tensor) -> Tensor:
    return (kv < p) | (kv <= q)


def _sink_tokens(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Tensor) -> Tensor:
    return (kv < p) | (q < 0)


def _document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Lookup) -> Tensor:
    return p(q) == p(kv)


def _alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Tensor) -> Tensor:
    return score + (kv - q) * p


def _soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Tensor) -> Tensor:
    return p * torch.tanh(score / p)


def _logit_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: Lookup) -> Tensor:
    return score + p(kv)


causal = Modifier(
    "causal",
    "mask",
    _KERNELS + "causal",
    _causal,
    range_kernel=_KERNELS + "causal_range",
    bounds=lambda first, last, p: (None, last + 1),
)
"""kv <= q."""

sliding_window = Modifier(
    "sliding_window",
    "mask",
    _KERNELS + "sliding_window",
    _sliding_window,
    int,
    range_kernel=_KERNELS + "sliding_window_range",
    bounds=lambda first, last, p: (first - p + 1, None),
)
"""q - kv < p: the last p keys, the query's own among them. It is not causal by itself."""

prefix_lm = Modifier(
    "prefix_lm",
    "mask",
    _KERNELS + "prefix_lm",
    _prefix_lm,
    int,
    range_kernel=_KERNELS + "prefix_lm_range",
    bounds=lambda first, last, p: (None, max(p, last + 1)),
)
"""kv < p or kv <= q."""

sink_tokens = Modifier(
    "sink_tokens",
    "mask",
    _KERNELS + "sink_tokens",
    _sink_tokens,
    int,
    range_kernel=_KERNELS + "sink_tokens_range",
    bounds=lambda first, last, p: (None, p),
)
"""kv < p: the first p keys; joined with a window by `or_masks`."""

document = Modifier("document", "mask", _KERNELS + "document", _document, int, is_table=True)
"""p[q] == p[kv], p the document of each position; positions behind the table have that of its last column."""

alibi = Modifier("alibi", "score", _KERNELS + "alibi", _alibi, float)
"""score + (kv - q) p, p the slope, of each head as a rule."""

soft_cap = Modifier("soft_cap", "score", _KERNELS + "soft_cap", _soft_cap, float)
"""p tanh(score / p)."""

logit_bias = Modifier("logit_bias", "score", _KERNELS + "logit_bias", _logit_bias, float, is_table=True)
"""score + p[kv]; keys behind the table have the bias of its last column."""

SHIPPED = {
    modifier.name: modifier
    for modifier in (causal, sliding_window, prefix_lm, sink_tokens, document, alibi, soft_cap, logit_bias)
}


def known_modifiers() -> list[str]:
    """Return the names of all modifiers, those of entry points among them."""
    return sorted({*SHIPPED, *(point.name for point in entry_points(group=GROUP))})


def find_modifier(name: str) -> Modifier:
    """Return the modifier of that name: one of this package's, or the one that an entry point names.

    Raises:
        ValueError: there is none; the message lists the known ones. TypeError: the entry point names something else.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    for point in entry_points(group=GROUP, name=name):
        found: Any = point.load()
        if not isinstance(found, Modifier):
            raise TypeError(f"{GROUP} {name!r}: expected a Modifier, got {type(found).__name__}")
        return found
    raise ValueError(f"modifier: expected one of {', '.join(known_modifiers())}; got {name!r}")
