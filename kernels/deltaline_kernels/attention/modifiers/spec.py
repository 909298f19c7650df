"""Modifiers as a constant of a kernel, and what a kernel may ask of it while it is compiled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import triton


@dataclass(frozen=True)
class SpecLeaf:
    """A modifier's `@triton.jit` functions and where its parameter is, as `Leaf` says."""

    function: Any
    range_function: Any
    offset: int
    per: str
    width: int
    is_table: bool
    is_float: bool
    has_parameter: bool


@dataclass(frozen=True)
class Spec:
    """Score modifiers and the clauses of the mask. Equal ones, of equal sources, are compiled once."""

    scores: tuple[SpecLeaf, ...]
    clauses: tuple[tuple[SpecLeaf, ...], ...]
    ranges_by_head: bool

    @property
    def cache_key(self) -> str:
        """A digest of the sources too: a compiled kernel must not outlive its modifiers."""
        leaves = [*self.scores, *(leaf for clause in self.clauses for leaf in clause)]
        functions = [f for leaf in leaves for f in (leaf.function, leaf.range_function)]
        keys = [getattr(function, "cache_key", repr(function)) for function in functions]
        sizes = [
            (leaf.offset, leaf.per, leaf.width, leaf.is_table, leaf.is_float, leaf.has_parameter) for leaf in leaves
        ]
        shape = (len(self.scores), [len(clause) for clause in self.clauses], self.ranges_by_head)
        return hashlib.sha256(repr((keys, sizes, shape)).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"Spec({self.cache_key})"


@triton.constexpr_function
def num_scores(spec: Spec) -> int:
    """How many score modifiers there are."""
    return len(spec.scores)


@triton.constexpr_function
def score_leaf(spec: Spec, i: int) -> SpecLeaf:
    """Score modifier i."""
    return spec.scores[i]


@triton.constexpr_function
def num_clauses(spec: Spec) -> int:
    """How many clauses the mask has."""
    return len(spec.clauses)


@triton.constexpr_function
def num_parts(spec: Spec, i: int) -> int:
    """How many parts clause i has."""
    return len(spec.clauses[i])


@triton.constexpr_function
def mask_leaf(spec: Spec, i: int, j: int) -> SpecLeaf:
    """Part j of clause i."""
    return spec.clauses[i][j]


@triton.constexpr_function
def range_heads(spec: Spec, num_heads: int) -> int:
    """Return of how many heads a range is found, as a power of two: of one, where they have the same."""
    return 1 << (num_heads - 1).bit_length() if spec.ranges_by_head else 1


@triton.constexpr_function
def leaf_function(leaf: SpecLeaf) -> Any:
    """What is inlined."""
    return leaf.function


@triton.constexpr_function
def leaf_range(leaf: SpecLeaf) -> Any:
    """What finds its range of keys."""
    return leaf.range_function


@triton.constexpr_function
def has_range(leaf: SpecLeaf) -> bool:
    """Whether it has a range of keys."""
    return leaf.range_function is not None


@triton.constexpr_function
def has_parameter(leaf: SpecLeaf) -> bool:
    """Whether it has a parameter."""
    return leaf.has_parameter


@triton.constexpr_function
def leaf_offset(leaf: SpecLeaf) -> int:
    """Where its parameter begins."""
    return leaf.offset


@triton.constexpr_function
def leaf_per(leaf: SpecLeaf) -> str:
    """What has a parameter of its own."""
    return leaf.per


@triton.constexpr_function
def leaf_width(leaf: SpecLeaf) -> int:
    """How many values a parameter has."""
    return leaf.width


@triton.constexpr_function
def leaf_is_table(leaf: SpecLeaf) -> bool:
    """Whether a parameter is a table."""
    return leaf.is_table


@triton.constexpr_function
def leaf_is_float(leaf: SpecLeaf) -> bool:
    """Whether a parameter is fp32."""
    return leaf.is_float


@triton.constexpr_function
def flat_index(spec: Spec, i: int, j: int) -> int:
    """Return the place of part j of clause i among all parts."""
    return sum(len(clause) for clause in spec.clauses[:i]) + j
