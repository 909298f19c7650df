"""The tokens of a recurrence in fp64, which know how they change a state: the truth of its cases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens(ABC):
    """fp64 tensors whose first dimensions are alike: `[T, ...]` packed, or `[R, T, ...]` for R rows of one length."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor."""
        return replace(self, **{field.name: function(getattr(self, field.name)) for field in fields(self)})

    @abstractmethod
    def advance(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens of rows through states `[R, HV, V, K]`; return o `[R, T, HV, V]` and the states after them."""

    @abstractmethod
    def record(self, state: Tensor) -> Tensor:
        """Return what a draft of each row keeps that follows `state`: the key, u and g, `[R, 1, H*K + HV*V + HV]`."""

    def walk(self, state: Tensor) -> dict[str, Tensor]:
        """Run rows through states token by token; return fp32, of each token, o, the state after it and the record."""
        found: dict[str, list[Tensor]] = {"o": [], "token_states": [], "drafts": []}
        for i in range(next(iter(vars(self).values())).shape[1]):
            token = self.map(lambda x, i=i: x[:, i : i + 1])  # type: ignore[misc]
            found["drafts"].append(token.record(state).float())
            o, state = token.advance(state)
            found["o"].append(o.float())
            found["token_states"].append(state[:, None].float())
        return {name: torch.cat(parts, dim=1) for name, parts in found.items()}

    @abstractmethod
    def only(self, is_accepted: Tensor) -> Self:
        """Return tokens of which those that are not accepted (`[R, T]`) neither decay a state nor write into it."""


def decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return G, the sums of g `[..., C]` within a chunk, and exp(G_i - G_j) for j <= i, zero elsewhere."""
    total = g.cumsum(-1)
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
