"""Which layers of a stack launch all that the whole of it does: of layers that are alike, few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# Whether memory begins at a multiple of so many bytes decides what is compiled.
ALIGNMENT = 16
# Objects of these packages are looked into; others are alike if they are equal.
_OWN = ("deltaline_kernels.", "deltaline_server.")


def distinct_layers(layers: Sequence[object], states: Sequence[object]) -> tuple[int, ...]:
    """Return the places of few layers that, one behind the other, launch all that the stack of them does, in order.

    Layers are alike if their states and all that they hold are, but for the contents of memory: sizes, strides, dtypes,
    alignment, numbers, and what they share with others. The first and the last one are among them, and of every kind of
    neighbours two, which in the stack are neighbours too: what one leaves is what the other begins with.
    """
    kinds, known, pairs = list[int](), list[Any](), set[tuple[int, int]]()
    for layer in zip(layers, states, strict=True):
        traits = _traits(layer)
        if traits not in known:
            known.append(traits)
        kinds.append(known.index(traits))
    found = {0, len(kinds) - 1}
    for place in range(1, len(kinds)):
        pair = kinds[place - 1], kinds[place]
        if pair not in pairs:
            pairs.add(pair)
            found |= {place - 1, place}
    return tuple(sorted(found))


def _traits(value: object) -> Any:
    """What values that are alike have in common."""
    kind = type(value)
    if isinstance(value, Tensor):
        memory = () if value.is_mkldnn else (value.stride(), value.data_ptr() % ALIGNMENT)
        return value.shape, value.dtype, value.device, memory
    if isinstance(value, Mapping):
        return kind, [_traits(one) for one in value.values()]  # of a cache the keys may be anything
    if isinstance(value, list | tuple):
        return kind, [_traits(one) for one in value]
    if kind.__module__.startswith(_OWN):
        return kind, {name: _traits(one) for name, one in vars(value).items()}
    return kind, value
