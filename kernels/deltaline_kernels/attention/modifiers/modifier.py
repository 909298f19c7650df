"""What changes a score, or says which keys a query sees: a modifier, and a modifier with its parameter.

A modifier is written twice: in Triton, to be inlined into the kernel, and in PyTorch, for the CPU and the reference. b
is the row of the page table, h the query head, q the position of the query, kv that of the key, p the parameter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import check_no_gradient

# Of int32, which the kernels have integers in.
LEAST, MOST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
WIDER = (torch.int64, torch.uint32, torch.uint64)
KINDS = ("score", "mask")
PER = ("all", "head", "sequence")

# A host's range of keys: least key, and the key behind the last one; None for no bound.
Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class Modifier:
    """A score or a mask modifier.

    Args:
        name: what it is found by.
        kind: "score" or "mask".
        kernel: "module:name" of the `@triton.jit` function, imported on the first launch. A score is
            `f(score, b, h, q, kv, p, WIDTH)` and returns the new score, a mask is `f(b, h, q, kv, p, WIDTH)` and
            returns whether q sees kv. Tensors broadcast to a tile: kv `[keys, 1]`, h and q `[1, queries]`. p is the
            value of the parameter, or with `is_table` a pointer to WIDTH of them.
        twin: the same in PyTorch, with p as a tensor that broadcasts; with `is_table` p(i) is the value at column i,
            that of the last column behind the end.
        parameter: int or float: every one needs a parameter of that type; None: there is none.
        is_table: a parameter is a row of values, not one.
        range_kernel: of a mask, "module:name" of `f(first, last, p, WIDTH)`: no query in first..last sees a key below
            the first number that it returns, nor one from the second on. None: they may see any key.
        bounds: the same on the host: `f(first, last, p)` in integers.

    Raises:
        ValueError: an unknown kind, a score with a range, or a range on one side only.
    """

    name: str
    kind: str
    kernel: str
    twin: Callable[..., Tensor]
    parameter: type[int] | type[float] | None = None
    is_table: bool = False
    range_kernel: str | None = None
    bounds: Callable[[int, int, Any], Bounds] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected {' or '.join(KINDS)}, got {self.kind!r}")
        if (self.range_kernel is None) != (self.bounds is None) or (self.bounds and self.kind == "score"):
            raise ValueError(f"{self.name}: expected range_kernel and bounds of a mask, or neither")

    def __call__(self, value: float | Tensor | None = None, *, per: str = "all") -> Part:
        """Return the modifier with its parameter.

        Args:
            value: a number; `[H]` for each query head with per="head"; `[L]` for each row of the page table with
                per="sequence". Of a table `[W]`, or `[H, W]`, `[L, W]`. Integers are int32: a tensor of int64 is taken
                on the host alone, where its values are looked at.

        Raises:
            TypeError, ValueError: a parameter that the modifier does not take, or none where it needs one.
        """
        if per not in PER:
            raise ValueError(f"per: expected {', '.join(PER)}, got {per!r}")
        if (value is None) != (self.parameter is None):
            wanted = "no parameter" if self.parameter is None else f"a parameter of {self.parameter.__name__}"
            raise TypeError(f"{self.name}: expected {wanted}, got {type(value).__name__}")
        if value is None:
            return Part(self, None, "all")
        check_no_gradient(self.name, value)
        dims = (per != "all") + self.is_table
        if not isinstance(value, Tensor):
            if dims or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{self.name}: expected {'a tensor' if dims else 'a number'}, got {value!r}")
            if self.parameter is int and not LEAST <= value <= MOST:
                raise ValueError(f"{self.name}: expected a number that int32 holds, got {value}")
            if self.parameter is int and int(value) != value:
                raise TypeError(f"{self.name}: expected an integer, got {value}")
        elif value.ndim != dims or value.numel() == 0:
            raise ValueError(f"{self.name}: expected a tensor of {dims} dimensions, got shape {list(value.shape)}")
        elif self.parameter is int:
            _check_integers(self.name, value)
        return Part(self, value, per)


@dataclass(frozen=True, eq=False)
class Part:
    """A modifier with its parameter; `per` says what has one of its own."""

    modifier: Modifier
    value: float | Tensor | None
    per: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.modifier.parameter is float else torch.int32

    @property
    def width(self) -> int:
        """Values of a parameter."""
        return self.value.shape[-1] if self.modifier.is_table and isinstance(self.value, Tensor) else 1


@dataclass(frozen=True)
class Mask:
    """Masks joined: a key is seen if all parts of one of the clauses say so."""

    clauses: tuple[tuple[Part, ...], ...]


def and_masks(*masks: Part | Mask) -> Mask:
    """Join masks: a key is seen if each of them says so; the range of keys is the intersection.

    Raises:
        TypeError, ValueError: no masks, or what is not one.
    """
    clauses: tuple[tuple[Part, ...], ...] = ((),)
    for mask in _masks(masks):
        clauses = tuple((*one, *other) for one in clauses for other in mask.clauses)
    return Mask(clauses)


def or_masks(*masks: Part | Mask) -> Mask:
    """Join masks: a key is seen if one of them says so; the range of keys is the hull.

    Raises:
        TypeError, ValueError: no masks, or what is not one.
    """
    return Mask(tuple(clause for mask in _masks(masks) for clause in mask.clauses))


def as_mask(mask: object) -> Mask:
    """Return a mask of one part, or a joined one, as a joined one.

    Raises:
        TypeError: neither.
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Part) and mask.modifier.kind == "mask":
        return Mask(((mask,),))
    raise TypeError(f"mask: expected a mask modifier with its parameter, got {_what(mask)}")


def as_score(score: object) -> Part:
    """Return `score` if it is a score modifier with its parameter.

    Raises:
        TypeError: it is not.
    """
    if isinstance(score, Part) and score.modifier.kind == "score":
        return score
    raise TypeError(f"scores: expected score modifiers with their parameters, got {_what(score)}")


def import_kernel(path: str) -> Any:
    """Return the function that "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_integers(name: str, value: Tensor) -> None:
    """Raise TypeError or ValueError unless int32 holds all values; what is on a device is not waited for."""
    if value.is_floating_point() or value.is_complex():
        raise TypeError(f"{name}: expected integers, got {value.dtype}")
    if value.dtype not in WIDER:
        return
    if value.dtype != torch.int64 or value.device.type != "cpu":
        raise TypeError(f"{name}: expected torch.int32, got {value.dtype} on {value.device}")
    least, most = (int(bound) for bound in value.aminmax())
    if least < LEAST or most > MOST:
        raise ValueError(f"{name}: expected numbers that int32 holds, got {least}..{most}")


def _masks(masks: tuple[Part | Mask, ...]) -> list[Mask]:
    if not masks:
        raise ValueError("masks: expected at least one, got none")
    return [as_mask(mask) for mask in masks]


def _what(value: object) -> str:
    if isinstance(value, Part):
        return f"the {value.modifier.kind} modifier {value.modifier.name!r}"
    if isinstance(value, Modifier):
        return f"the modifier {value.name!r} itself, which is called with its parameter first"
    return type(value).__name__
