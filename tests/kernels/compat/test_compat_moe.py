"""Experts under vLLM's name and arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from rigs.kernels.expert_batches import Batch, make_batch
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from torch import Tensor

from deltaline_kernels import run_experts
from deltaline_kernels.compat import fused_experts


def call(batch: Batch, **told: Any) -> Tensor:
    return fused_experts(batch.x, batch.gate_up, batch.down, batch.weights, told.pop("ids", batch.experts), **told)


def test_it_is_our_operation(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5)
    want = run_experts(**vars(batch))
    assert same_bits(call(batch), want)
    assert same_bits(call(batch, ids=batch.experts.long(), global_num_experts=5), want)


def test_in_place_it_overwrites_the_tokens(path: Path) -> None:
    batch = make_batch(path, 9, 2, 5)
    want = call(batch)
    assert call(batch, inplace=True) is batch.x
    assert same_bits(batch.x, want)


def test_map_names_the_experts_of_this_process(path: Path) -> None:
    batch = make_batch(path, 9, 2, 3)
    held = torch.tensor([-1, 2, -1, 0, 1], dtype=torch.int32, device=path.device)
    everywhere = torch.tensor([3, 4, 1, 99, -1, 0], device=path.device)
    here = torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32, device=path.device)
    numbers = torch.arange(18, device=path.device).remainder(6).view(9, 2)
    batch.gate_up.copy_(torch.ones_like(batch.gate_up))
    batch.down.copy_(torch.ones_like(batch.down))
    batch.weights.copy_(torch.ones_like(batch.weights))
    want = run_experts(batch.x, batch.gate_up, batch.down, batch.weights, here[numbers])
    assert same_bits(call(batch, ids=everywhere[numbers], expert_map=held), want)


def test_wide_numbers_that_are_no_expert_stay_none(path: Path) -> None:
    batch = make_batch(path, 3, 2, 3)
    wide = torch.full((3, 2), 1 << 32, device=path.device)
    assert not call(batch, ids=wide).any()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"activation": "gelu"}, "activation: expected 'silu', the only one that is offered, got 'gelu'"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input: expected False"),
        ({"expert_map": torch.zeros(0, dtype=torch.int32)}, "expert_map: expected at least 1 expert, got none"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int32)}, "topk_ids: expected shape"),
    ],
)
def test_other_meanings_are_refused(told: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        call(make_batch(Path("cpu", torch.float32), 3, 2, 4), **told)
