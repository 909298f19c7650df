"""The tests of hyper-connections again, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernels.mhc.test_mhc import (
    test_comb_of_far_apart_logits_has_columns_of_sum_one,
    test_gates_have_their_own_numbers,
    test_mhc_takes_rows_apart,
    test_streams_of_any_size_are_normed,
    test_tokens_of_nothing_give_no_nan,
    test_weights_are_those_of_fp32,
)
from rigs.kernels.mhc_batches import (
    check_head,
    check_post,
    check_post_pre,
    check_pre,
    make_streams,
    run_head,
    run_post,
    run_post_pre,
    run_pre,
)
from rigs.kernels.paths import InterpretedPath

from deltaline_kernels.mhc import plan


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut batches into fewer programs: the interpreter runs one after the other."""
    few = tuple(
        replace(bucket, product=(*bucket.product[:4], bucket.product[4] // 32), collapse=(64, 32))
        for bucket in plan.BUCKETS
    )
    monkeypatch.setattr(plan, "BUCKETS", few)


@pytest.mark.parametrize(
    "shape", [(1, 4, 40), (7, 3, 24), (18, 2, 48), (3, 8, 16), (5, 1, 33), (3, 4, 1), (2, 4, 200)], ids=str
)
def test_mhc_matches_the_reference(path: InterpretedPath, shape: tuple[int, int, int]) -> None:
    given = make_streams(*shape, path)
    norm = given.norm if shape[0] % 2 else None
    check_pre(run_pre(path, given, norm), given, norm)
    check_post(run_post(path, given), given)
    check_post_pre(run_post_pre(path, given, norm), given, norm)
    check_head(run_head(path, given), given)


@pytest.fixture
def bf16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply bf16 as what it is: the interpreter takes its bits for integers."""
    from triton import language
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), language.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, widen(a), widen(b), *others)

    monkeypatch.setattr(builder, "create_dot", create_dot)


@pytest.mark.usefixtures("bf16_dots")
@pytest.mark.parametrize("shape", [(5, 4, 40), (65, 1, 33), (65, 4, 24), (65, 8, 16)], ids=str)
def test_products_of_bf16_have_all_terms_of_a_weight(shape: tuple[int, int, int]) -> None:
    """Of few tokens one after the other, of many two at once; gates as exact as those of fp32 streams."""
    path = InterpretedPath("cpu", torch.bfloat16)
    given = make_streams(*shape, path)
    assert given.gates.terms is not None
    check_pre(run_pre(path, given), given)


def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every batch be one of many tokens, in chunks of 32."""
    monkeypatch.setattr(plan, "BUCKETS", (plan.Bucket(plan.ANY, (16, 32, 4, 2, 6), (32, 32), chunk=32),))


def test_many_tokens_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch, path: InterpretedPath) -> None:
    in_chunks(monkeypatch)
    given = make_streams(75, 4, 40, path)
    made = plan.plan_pre(75, 4, 40, path.dtype, norm=False)
    assert made.chunk == 32 and made.splits > 1 and made.block_h == 32
    got = run_pre(path, given)
    check_pre(got, given)
    check_post_pre(run_post_pre(path, given, given.norm), given, given.norm)
    # A token's bits are those of a batch of one chunk.
    for one, few in zip(got, run_pre(path, given.take(slice(0, 7))), strict=True):
        assert torch.equal(one[:7], few)
