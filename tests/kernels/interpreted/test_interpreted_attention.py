"""The tests of attention again: the Triton kernels in Triton's interpreter, on CPU tensors.

Of most a small one, in fp16: a tile takes the interpreter milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels.attention.test_attention as checks
import kernels.attention.test_attention_modifiers as own
import pytest
import torch
import triton
import triton.language as tl
from kernels.attention.test_attention import (
    small_splits,
    test_attention_leaves_no_more_for_the_combine_than_may_be,
    test_attention_of_lines_that_share_pages,
    test_attention_of_skipped_rows_is_zero,
    test_attention_scales,
    test_attention_without_rows_or_tokens,
    test_parameters_may_change_between_launches,
)
from rigs.kernels.attention_batches import MODIFIER_CASES, Layer, Row, finished, make_batch, modifier_case
from rigs.kernels.paths import InterpretedPath
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.attention.items import count_items, find_splits

MIXED = [Row(1, 150), Row(3, 60), Row(0, 9), Row(2, 30, skipped=True), Row(9, 40)]


@pytest.fixture
def path() -> InterpretedPath:
    """fp16: fp32 takes another kind of product, which one test here has."""
    return InterpretedPath("cpu", torch.float16)


@pytest.mark.parametrize("case", MODIFIER_CASES)
def test_attention_matches_flex_attention(path: InterpretedPath, case: str, small_splits: None) -> None:
    batch = make_batch(MIXED, path, max_short=3)
    modifiers, truth = modifier_case(case, batch.layer, batch.page_table.shape[0])
    o, lse = batch.attend(path, modifiers, sinks=batch.sinks, gate=batch.gate)
    want, want_lse = finished(batch, *batch.expected(truth), sinks=True, gate=True)
    assert_close("o", o, want, path.dtype)
    checks.lse_close(lse, want_lse)


def test_attention_of_fp32_matches_the_reference(small_splits: None) -> None:
    path = InterpretedPath("cpu", torch.float32)
    batch = make_batch(MIXED, path, Layer(3, 1, 96, 64, 64), max_short=3)
    checks.check(batch, path, *modifier_case("alibi", batch.layer, 7))


@pytest.mark.parametrize(
    "layer",
    [Layer(5, 1, 192, 128, 16), Layer(12, 2, 80, 144, 64), Layer(7, 1, 256, 256, 256)],
    ids=["5-1", "12-2", "7-1"],
)
def test_attention_has_any_sizes(path: InterpretedPath, layer: Layer, small_splits: None) -> None:
    batch = make_batch([Row(1, 100), Row(4, 60), Row(9, 5)], path, layer, max_short=4)
    checks.check(batch, path, *modifier_case("causal", layer, 5))


def test_attention_has_any_number_of_short_tokens(path: InterpretedPath, small_splits: None) -> None:
    batch = make_batch([Row(n, 7 * n) for n in (1, 2, 5, 11, 16)], path, Layer(3, 1))
    checks.check(batch, path, *modifier_case("sliding-window", batch.layer, 7))


def test_attention_of_queries_that_see_nothing_is_zero(path: InterpretedPath, small_splits: None) -> None:
    # The warnings of the reference's infinities are none of NumPy's: nothing in the kernel may be NaN.
    checks.test_attention_of_queries_that_see_nothing_is_zero(path, small_splits)


def test_attention_reads_only_its_window(path: InterpretedPath, small_splits: None) -> None:
    checks.test_attention_reads_only_its_window(path, small_splits)


def test_attention_does_not_depend_on_neighbours(path: InterpretedPath, small_splits: None) -> None:
    checks.test_attention_does_not_depend_on_neighbours(path, "soft-cap-in-a-window", small_splits)


def test_the_number_of_multiprocessors_changes_nothing(
    path: InterpretedPath, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltaline_kernels.attention import launch

    batch = make_batch(MIXED, path, max_short=3)
    modifiers, _ = modifier_case("causal", batch.layer, 7)
    found = []
    for count in (1, 3, 200):
        monkeypatch.setattr(launch, "num_processors", lambda _, count=count: count)
        found.append(batch.attend(path, modifiers))
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(lse, found[0][1])


def test_more_rows_than_are_counted_at_once(
    path: InterpretedPath, small_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltaline_kernels.attention import launch

    monkeypatch.setattr(launch, "count_at_once", lambda num_rows: 2)
    batch = make_batch(MIXED, path, max_short=3)
    checks.check(batch, path, *modifier_case("causal", batch.layer, 7))


def test_a_registered_modifier_is_inlined(path: InterpretedPath, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(name: str) -> Any:
        asked.append(name)
        return own.OWN

    monkeypatch.setattr(own, "find_modifier", find)
    # Compares the outputs with those of a mask in PyTorch.
    own.test_a_registered_modifier_is_inlined(path, None)
    assert asked == ["every_third"]


@triton.jit  # type: ignore[untyped-decorator]
def _find_rows(  # type: ignore[no-untyped-def]
    found,
    control,
    parameters,
    blocks,
    control_stride,
    num_rows,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPEC: tl.constexpr,
):
    row = tl.program_id(0)
    base = count_items(
        control, control_stride, row, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, ROWS, DENSE, BLOCKS, SPEC
    )
    splits = find_splits(
        row, control, control_stride, num_rows, parameters, blocks, HQ, HEADS, TOKENS, SPLIT, DENSE, BLOCKS, SPEC
    )
    tl.store(found + 2 * row, base)
    tl.store(found + 2 * row + 1, splits)


@pytest.mark.parametrize("at_once", [2, 256])
def test_only_live_splits_are_items(
    path: InterpretedPath, small_splits: None, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """PyTorch's kernel cuts all keys: a window leaves most of its programs idle."""
    from deltaline_kernels.attention import launch

    found = torch.zeros(5, 2, dtype=torch.int32)

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: None

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return self.call

        def call(
            self, control: torch.Tensor, parameters: torch.Tensor, blocks: torch.Tensor, *rest: Any, **constants: Any
        ) -> None:
            names = ("HQ", "TOKENS", "SPLIT", "ROWS", "DENSE", "BLOCKS", "SPEC")
            own = {name: constants[name] for name in names} | {"HEADS": constants["HQ"] // constants["GROUP"]}
            _find_rows[(5,)](found, control, parameters, blocks, control.stride(0), 5, **own)

    monkeypatch.setattr(launch, "count_at_once", lambda num_rows: at_once)
    monkeypatch.setattr(launch, "attend_kernel", Nothing())
    monkeypatch.setattr(launch, "combine_kernel", Spy())
    # Splits of 64 keys, a window of 37. A row without live keys is an item too: it writes zeros.
    batch = make_batch([Row(1, 650), Row(2, 100), Row(1, 0), Row(2, 300, skipped=True), Row(3, 630)], path)
    modifiers, _ = modifier_case("sliding-window", batch.layer, 7)
    batch.attend(path, modifiers)
    assert found[:, 1].tolist() == [2, 1, 1, 1, 1]
    batch.attend(path)
    counts = [11, 2, 1, 1, 10]
    assert found[:, 1].tolist() == counts
    assert found[:, 0].tolist() == [sum(counts[:i]) * batch.layer.HKV for i in range(5)]
