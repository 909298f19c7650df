"""Residual branches over ranks: what is asked of the launch that sums where the next branch begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from deltaline_server.layers.block import Layer, Residual
from deltaline_server.layers.projection import Projection
from deltaline_server.ranks.ways import Ranks

SIZE = 16


class Sums:
    """Ranks that sum every summand in one launch, and keep what they were asked."""

    def joins(self, summand: Tensor) -> bool:
        return True

    def join(self, *asked: Any) -> tuple[Tensor, Tensor]:
        self.asked = asked
        return asked[1], asked[0]


@pytest.mark.parametrize("name", ["in_proj", "gate_up", None])
def test_ranks_are_told_which_weight_a_branch_multiplies_by_first(name: str | None) -> None:
    weight = torch.randn(24, SIZE, dtype=torch.bfloat16)
    inner = SimpleNamespace(**{name: Projection([weight])} if name else {})
    sums, norm = Sums(), torch.ones(SIZE)
    branch = Residual(cast(Layer, inner), norm, 1e-6, torch.bfloat16, ranks=cast(Ranks, sums))
    made, hidden = torch.randn(3, SIZE).bfloat16(), torch.randn(3, SIZE).bfloat16()
    assert branch.enter_behind(made, hidden, 0.5) == (hidden, made)
    *others, ahead = sums.asked
    assert ahead is (weight if name else None)
    assert others == [made, hidden, norm, 1e-6, 0.5]
