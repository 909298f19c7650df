"""The modifiers of an attention with their parameters in one tensor, as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention.modifiers.modifier import Bounds, Mask, Part, as_mask, as_score, import_kernel


@dataclass(frozen=True)
class Leaf:
    """A part as a kernel sees it: where its parameter begins, whose it is, how wide it is, whether it is fp32."""

    part: Part
    offset: int
    per: str
    width: int
    is_table: bool
    is_float: bool


class Modifiers:
    """Score modifiers, one after the other, then a mask.

    Args:
        scores: each changes what the one before it returned; the first one the scaled product.
        mask: one part or several joined by `and_masks` and `or_masks`; None: every key is seen.
        device: where the parameters are to be.

    Attributes:
        parameters: int32, all parameters; those of fp32 are there bit by bit. The kernels read it at every launch.

    Raises:
        TypeError: what is not a modifier of that kind with its parameter.
    """

    def __init__(
        self, scores: Sequence[Part] = (), mask: Part | Mask | None = None, *, device: torch.device | str = "cpu"
    ) -> None:
        clauses = () if mask is None else as_mask(mask).clauses
        self._leaves: dict[int, Leaf] = {}
        self._values: list[Tensor] = []
        self._size = 0
        self.scores = tuple(self._place(as_score(score), device) for score in scores)
        self.clauses = tuple(tuple(self._place(part, device) for part in clause) for clause in clauses)
        # Without parameters nothing is launched to make them.
        nothing = torch.empty(1, dtype=torch.int32, device=device)
        self.parameters = torch.cat(self._values) if self._values else nothing

    def _place(self, part: Part, device: torch.device | str) -> Leaf:
        """Return the leaf of a part, which may stand in several clauses."""
        leaf = self._leaves.get(id(part))
        if leaf is None:
            is_float, is_table = part.dtype == torch.float32, part.modifier.is_table
            leaf = self._leaves[id(part)] = Leaf(part, self._size, part.per, part.width, is_table, is_float)
            if isinstance(part.value, Tensor):
                value = part.value.to(device=device, dtype=part.dtype).reshape(-1)
            elif part.value is not None:
                # Filled on the device: copied from the host it could not be captured.
                value = torch.full((1,), part.value, dtype=part.dtype, device=device)
            else:
                return leaf
            self._values.append(value.view(torch.int32))
            self._size += value.numel()
        return leaf

    def value(self, part: Part) -> Tensor:
        """Return the parameter of `part` in `parameters`, flat, to be changed between launches.

        Raises:
            KeyError: it is not one of these modifiers, or has none.
        """
        leaf = self._leaves[id(part)]
        if part.value is None:
            raise KeyError(part.modifier.name)
        size = part.value.numel() if isinstance(part.value, Tensor) else 1
        return self.parameters[leaf.offset : leaf.offset + size].view(part.dtype)

    def check(self, num_heads: int, num_lines: int, device: torch.device) -> None:
        """Raise ValueError unless parameters are on `device` and there is one for every head or line."""
        if self.parameters.device != device:
            raise ValueError(f"modifiers: expected device {device}, got {self.parameters.device}")
        for leaf in self._leaves.values():
            value, wanted = leaf.part.value, {"all": None, "head": num_heads, "sequence": num_lines}[leaf.per]
            if wanted is not None and isinstance(value, Tensor) and value.shape[0] != wanted:
                name = leaf.part.modifier.name
                raise ValueError(f"{name}: expected parameters of {wanted} {leaf.per}s, got {value.shape[0]}")

    @property
    def all_leaves(self) -> list[Leaf]:
        return [*self.scores, *(leaf for clause in self.clauses for leaf in clause)]

    @property
    def ranges_by_head(self) -> bool:
        """Whether the range of keys differs between heads."""
        return any(leaf.per == "head" and leaf.part.modifier.bounds for clause in self.clauses for leaf in clause)

    @cached_property
    def spec(self) -> Any:
        """The modifiers as a constant of the kernels; imports the functions that are inlined."""
        # Imported here: only the kernels need triton.
        from deltaline_kernels.attention.modifiers.spec import Spec, SpecLeaf

        made = {}
        for leaf in self.all_leaves:
            modifier = leaf.part.modifier
            ranges = None if modifier.range_kernel is None else import_kernel(modifier.range_kernel)
            made[id(leaf)] = SpecLeaf(
                import_kernel(modifier.kernel),
                ranges,
                leaf.offset,
                leaf.per,
                leaf.width,
                leaf.is_table,
                leaf.is_float,
                modifier.parameter is not None,
            )
        clauses = tuple(tuple(made[id(leaf)] for leaf in clause) for clause in self.clauses)
        return Spec(tuple(made[id(leaf)] for leaf in self.scores), clauses, self.ranges_by_head)

    def modify(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, kinds: Tensor | None = None) -> Tensor:
        """Return the modified score, with -inf where the mask lets no query see a key.

        `score` is of the shape that b, h, q and kv broadcast to; `kinds` are those of its blocks: of a whole one the
        mask is not asked, one in no list is not seen.
        """
        for leaf in self.scores:
            score = leaf.part.modifier.twin(score, b, h, q, kv, self._parameter(leaf, b, h))
        if kinds is not None:
            seen = (kinds == 2) | ((kinds == 1) & self.sees(b, h, q, kv))
        elif self.clauses:
            seen = self.sees(b, h, q, kv)
        else:
            return score
        return torch.where(seen, score, -torch.inf)

    def sees(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return whether the mask lets q see kv; of a shape that broadcasts to that of the scores."""
        seen = None if self.clauses else torch.ones((), dtype=torch.bool, device=kv.device)
        for clause in self.clauses:
            joined = None
            for leaf in clause:
                one = leaf.part.modifier.twin(b, h, q, kv, self._parameter(leaf, b, h))
                joined = one if joined is None else joined & one
            seen = joined if seen is None else seen | joined  # type: ignore[operator]
        assert seen is not None
        return seen

    def bounds(self, b: int, first: int, last: int, num_keys: int) -> tuple[int, int]:
        """Return the first key that a query in first..last of line b may see, and the one behind the last."""
        low, high = (0, num_keys) if not self.clauses else (num_keys, 0)
        for clause in self.clauses:
            begin, end = 0, num_keys
            for leaf in clause:
                one, other = self._bounds(leaf, b, first, last)
                begin = begin if one is None else max(begin, one)
                end = end if other is None else min(end, other)
            if begin < end:
                low, high = min(low, begin), max(high, end)
        return low, max(low, high)

    def _bounds(self, leaf: Leaf, b: int, first: int, last: int) -> Bounds:
        """Return the bounds of a leaf: the widest of those of its heads."""
        modifier = leaf.part.modifier
        if modifier.bounds is None:
            return None, None
        values: list[Any] = [None]
        if leaf.part.value is not None:
            values = self.value(leaf.part).tolist()
            values = values[b : b + 1] if leaf.per == "sequence" else values
        lows, highs = zip(*(modifier.bounds(first, last, value) for value in values), strict=True)
        low = None if None in lows else min(lows)
        return low, None if None in highs else max(highs)

    def _parameter(self, leaf: Leaf, b: Tensor, h: Tensor) -> Any:
        """Return what the twin of a leaf takes for its parameter."""
        if leaf.part.value is None:
            return None
        values = self.value(leaf.part).view(-1, leaf.width)
        row = {"all": torch.zeros_like(b), "head": h, "sequence": b}[leaf.per]
        if leaf.is_table:
            return lambda column: values[row, column.clamp(max=leaf.width - 1)]
        return values[row, 0]
