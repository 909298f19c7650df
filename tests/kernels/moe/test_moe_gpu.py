"""Experts on a GPU: nothing waits for it, graphs follow what tensors hold, and sorted choices fit in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.expert_batches import Choose, anything, make_batch, one, some
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Router
from deltaline_kernels.moe import plan

GPU = Path("cuda", torch.bfloat16)
# Tokens of every way: choice by choice, in tiles of every size, sorted.
TOKENS = (1, 4, 5, 16, 48, 128, 400)
IN_FP8 = pytest.mark.parametrize("in_fp8", [False, True], ids=["", "fp8"])
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nan_memory() -> None:
    """Leave torch.empty as it is: while a graph is captured, what fills it would be captured."""


@IN_FP8
@pytest.mark.parametrize("choose", [anything, one, some], ids=lambda choose: choose.__name__)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_sizes_of_a_model_match_the_reference(num_tokens: int, choose: Choose, in_fp8: bool) -> None:
    batch = make_batch(GPU, num_tokens, 4, 16, 512, 256, choose)
    batch = batch.in_fp8() if in_fp8 else batch
    assert_close("out", batch.run(GPU), batch.run_reference(), GPU.dtype)


@IN_FP8
@pytest.mark.parametrize("choose", [anything, one, some], ids=lambda choose: choose.__name__)
def test_sorted_choices_match_the_reference(monkeypatch: pytest.MonkeyPatch, choose: Choose, in_fp8: bool) -> None:
    monkeypatch.setattr(plan, "DIRECT_TOKENS", 0)
    monkeypatch.setattr(plan, "SORTED_CHOICES", 0)
    for num_tokens in (1, 3, 40, 300, 2100):
        batch = make_batch(GPU, num_tokens, 4, 16, 256, 128, choose, num_tokens)
        batch = batch.in_fp8() if in_fp8 else batch
        assert_close("out", batch.run(GPU), batch.run_reference(), GPU.dtype)


@IN_FP8
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_row_does_not_depend_on_its_neighbours(num_tokens: int, in_fp8: bool) -> None:
    batch = make_batch(GPU, num_tokens, 4, 16, 512, 256)
    batch = batch.in_fp8() if in_fp8 else batch
    got, row, shift = batch.run(GPU), num_tokens // 2, num_tokens // 3
    assert same_bits(batch.alone(row).run(GPU)[row], got[row])
    assert same_bits(batch.rolled(shift).run(GPU).roll(-shift, 0), got)
    for _ in range(3):
        assert same_bits(batch.run(GPU), got)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_nothing_waits_and_a_graph_follows_the_routes(num_tokens: int) -> None:
    batch = make_batch(GPU, num_tokens, 5, 17, 512, 256)
    batch.gate_up.nan_to_num_(0.5)
    batch.down.nan_to_num_(0.5)
    router = Router(4, num_shared=1, shared_gate=True)
    logits = torch.randn(num_tokens, 17, device="cuda")
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")

    def run() -> tuple[Tensor, ...]:
        weights, experts = GPU.route(logits, router, None, starts)
        made = replace(batch, weights=weights, experts=experts).run(GPU)
        at_once = GPU.route_and_run(batch.x, logits, router, batch.gate_up, batch.down, None, starts)
        return weights, experts, made, at_once

    def change() -> None:
        logits.copy_(torch.randn(num_tokens, 17, device="cuda"))
        batch.x.copy_(torch.randn(batch.x.shape, device="cuda"))
        starts[1] = num_tokens * 2 // 3

    run()
    with no_waits():
        run()
    check_replay(run, (), change)
    *_, made, at_once = run()
    assert same_bits(made, at_once)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_padding_alone_is_computed(num_tokens: int) -> None:
    """As while graphs are captured: nobody has an expert, and nothing is read."""
    batch = make_batch(GPU, num_tokens, 4, 16, 512, 256)
    none = replace(batch, experts=torch.full_like(batch.experts, -1))
    assert not none.run(GPU).any()
    torch.cuda.synchronize()


def test_products_are_right_beyond_128_tokens() -> None:
    """Of small integers, all ones among them: what an assembler gets wrong shows here."""
    for rows in (16, 32, 64, 128):
        chosen = next(bucket.plan for bucket in plan.BUCKETS if bucket.plan.rows == rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "DIRECT_TOKENS", 0)
            patch.setattr(plan, "SORTED_CHOICES", plan.ANY)
            patch.setattr(plan, "BUCKETS", (plan.Bucket(plan.ANY, chosen),))
            batch = make_batch(GPU, 330, 2, 2, 512, 512, one, integers=True)
            assert_close("out", batch.run(GPU), batch.run_reference(), GPU.dtype)
            ones = replace(batch, x=torch.ones_like(batch.x))
            assert_close("out", ones.run(GPU), ones.run_reference(), GPU.dtype)
