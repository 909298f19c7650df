"""The pool's sizes, and that zeroing lines reaches all of them and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.kv_cache import USUAL_TOKENS, KvState
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape, Mamba2Shape, MixerShape
from deltaline_server.layers.state_pool import StateOptions, StatePool, plan_state

SHAPE = GatedDeltaNetShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=4, conv_width=4)
OPTIONS = StateOptions(num_lines=5, max_draft=3)
ATTENTION = AttentionShape(6, 2, 16, 4, 1e4, max_positions=100)
LINE_BYTES = 2 * (3 + 3) * 48 + 4 * 4 * 4 * 8 + 4 * 2 * 3 * (16 + 16 + 4)


def make_pool(device: str = "cpu", options: StateOptions = OPTIONS) -> StatePool:
    return StatePool([SHAPE, SHAPE], options, dtype=torch.bfloat16, device=torch.device(device))


def tensors_in(thing: object) -> Iterator[Tensor]:
    """Every tensor that can be reached from `thing`, however it is kept."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_in(part)
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))
    elif is_dataclass(thing):
        yield from tensors_in([getattr(thing, field.name) for field in fields(thing)])
    elif isinstance(thing, StatePool):
        yield from tensors_in(vars(thing))


def memory_bytes(pool: StatePool) -> int:
    """Bytes of all memory that is behind a pool's tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors_in(pool)}
    return sum(storage.nbytes() for storage in storages.values())


def test_shapes_and_dtypes() -> None:
    pool = make_pool()
    assert len(pool.layers) == 2
    for layer in pool.layers:
        assert (layer.conv.shape, layer.conv.dtype) == ((6, 6, 48), torch.bfloat16)
        assert (layer.recurrent.shape, layer.recurrent.dtype) == ((6, 4, 4, 8), torch.float32)
        assert (layer.drafts.shape, layer.drafts.dtype) == ((6, 2, 3, 36), torch.float32)


def test_shapes_of_mamba2() -> None:
    shape = Mamba2Shape(2, 4, 16, 8, 4, 1, (0.0, math.inf), has_conv_bias=True, has_bias=False)
    pool = StatePool([shape], OPTIONS, dtype=torch.bfloat16, device=torch.device("cpu"))
    (layer,) = pool.layers
    assert (layer.conv.shape, layer.conv.dtype) == ((6, 6, 96), torch.bfloat16)
    assert (layer.recurrent.shape, layer.recurrent.dtype) == ((6, 4, 8, 16), torch.float32)
    assert (layer.drafts.shape, layer.drafts.dtype) == ((6, 2, 3, 32 + 32 + 4), torch.float32)
    assert pool.total_bytes == memory_bytes(pool)


def test_bytes_are_those_of_the_tensors() -> None:
    pool = make_pool()
    assert pool.bytes_per_sequence == 2 * LINE_BYTES
    assert pool.total_bytes == memory_bytes(pool)
    assert plan_state([SHAPE, SHAPE], OPTIONS, torch.bfloat16).line_bytes == pool.bytes_per_sequence
    half = make_pool(options=replace(OPTIONS, state_dtype=torch.bfloat16))
    assert pool.bytes_per_sequence - half.bytes_per_sequence == 2 * 2 * 4 * 4 * 8


def test_a_pool_above_its_limit_is_refused_before_it_is_allocated() -> None:
    needed = 6 * 2 * LINE_BYTES
    assert make_pool(options=replace(OPTIONS, limit_bytes=needed)).total_bytes == needed
    with pytest.raises(ModelError, match=f"--state-bytes: expected at least {needed} .* got a limit of {needed - 1}"):
        make_pool(options=replace(OPTIONS, limit_bytes=needed - 1))
    with pytest.raises(ModelError, match="--state-bytes"):
        make_pool(options=replace(OPTIONS, num_lines=1 << 60, limit_bytes=1 << 40))


def test_a_pool_that_the_device_has_no_room_for_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^--max-sequences: expected cpu to have room for [0-9]{18,} bytes of state"):
        make_pool(options=replace(OPTIONS, num_lines=1 << 50))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (StateOptions(0, 1), "num_lines: expected at least 1, got 0"),
        (StateOptions(1, 0), "max_draft: expected at least 1, got 0"),
        (StateOptions(1, 1, torch.float16), "state_dtype: expected float32 or bfloat16"),
    ],
    ids=["lines", "draft", "dtype"],
)
def test_options_that_cannot_be_are_refused(options: StateOptions, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_pool(options=options)


@pytest.mark.parametrize("lines", [[3], [5, 1], [1, 2, 3, 4, 5], [0, 2], []], ids=str)
def test_zero_reaches_every_tensor_of_the_lines_and_no_other_line(device: str, lines: list[int]) -> None:
    shapes: list[MixerShape] = [SHAPE, replace(SHAPE, num_value_heads=6), SHAPE]
    pool = StatePool(shapes, OPTIONS, dtype=torch.bfloat16, device=torch.device(device))
    found = [tensor for layer in pool.layers for tensor in layer.tensors]
    assert len(found) == 9 and sum(tensor.nbytes for tensor in found) == memory_bytes(pool)
    for tensor in found:
        tensor.fill_(torch.nan)
    pool.zero(np.array(lines, dtype=np.int64))
    for tensor in found:
        for line in range(6):
            assert (tensor[line] == 0).all() if line in lines else tensor[line].isnan().all()


def test_lines_of_layers_that_are_alike_lie_together() -> None:
    other = replace(SHAPE, num_value_heads=6)
    shapes: list[MixerShape] = [SHAPE, ATTENTION, other, SHAPE]
    pool = StatePool(shapes, replace(OPTIONS, page_size=16), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert [block.layers for block in pool.line_blocks] == [(0, 3), (2,)]
    for block in pool.line_blocks:
        for i, place in enumerate(block.layers):
            for whole, tensor in zip(block.tensors, pool.layers[place].tensors, strict=True):
                whole[i].fill_(place + 1)
                assert tensor.is_contiguous() and (tensor == place + 1).all()
                assert tensor.data_ptr() == whole[i].data_ptr()


@pytest.mark.parametrize("lines", [[1, 6], [-1, 1]], ids=str)
def test_zero_of_a_line_that_is_none_changes_nothing(lines: list[int]) -> None:
    pool = make_pool()
    for tensor in tensors_in(pool):
        tensor.fill_(7)
    with pytest.raises(IndexError, match=r"lines: expected 0\.\.5"):
        pool.zero(np.array(lines))
    assert all(bool((tensor == 7).all()) for tensor in tensors_in(pool))


def make_hybrid(device: str = "cpu", limit_bytes: int = 0) -> StatePool:
    options = replace(OPTIONS, page_size=16, limit_bytes=limit_bytes)
    shapes: list[MixerShape] = [SHAPE, ATTENTION, ATTENTION]
    return StatePool(shapes, options, dtype=torch.bfloat16, device=torch.device(device))


PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 2
"""Keys and values of two layers, 16 tokens of 2 heads of 16 channels in 16 bits."""


def test_attention_layers_have_pages_and_share_a_table() -> None:
    pool = make_hybrid()
    line, first, second = pool.layers
    assert isinstance(first, KvState) and isinstance(second, KvState) and pool.kv is not None
    # 5 lines of 100 tokens, fewer than are usual
    assert (pool.kv.num_pages, pool.kv.max_context, pool.kv.max_pages, pool.kv.page_bytes) == (35, 100, 7, PAGE_BYTES)
    assert (first.k_pages.shape, first.k_pages.dtype) == ((36, 16, 2, 16), torch.bfloat16)
    assert first.k_pages.data_ptr() != second.k_pages.data_ptr() != second.v_pages.data_ptr()
    assert first.page_table is second.page_table is pool.page_table
    assert (first.page_table.shape, first.page_table.dtype) == ((6, 7), torch.int32)
    assert pool.bytes_per_sequence == LINE_BYTES + 7 * 4
    assert pool.total_bytes == 6 * pool.bytes_per_sequence + 36 * PAGE_BYTES
    assert sum(state.nbytes for state in line.tensors) == 6 * LINE_BYTES


def test_long_contexts_have_pages_for_what_is_usual_and_for_one_whole() -> None:
    for longest, lines, expected in ((10_000, 2, 10_000), (10_000, 50, 50 * USUAL_TOKENS)):
        plan = plan_state([replace(ATTENTION, max_positions=longest)], replace(OPTIONS, num_lines=lines), torch.float32)
        assert plan.kv is not None
        assert (plan.kv.num_pages, plan.kv.max_context) == (-(-expected // 64), longest)


@pytest.mark.parametrize(("longest", "page_size"), [(1, 64), (100, 4096), (40, 16), (10_000, 4096)])
def test_each_line_has_pages_of_its_own(longest: int, page_size: int) -> None:
    shape, options = replace(ATTENTION, max_positions=longest), replace(OPTIONS, num_lines=9, page_size=page_size)
    plan = plan_state([shape], options, torch.float32)
    assert plan.kv is not None
    assert plan.kv.num_pages == 9 * -(-min(longest, USUAL_TOKENS) // page_size)


def test_what_lines_leave_of_the_limit_is_for_pages() -> None:
    whole = 6 * (LINE_BYTES + 7 * 4)
    for num_pages in (7, 9, 200):
        for spare in (0, PAGE_BYTES - 1):
            pool = make_hybrid(limit_bytes=whole + (num_pages + 1) * PAGE_BYTES + spare)
            assert pool.kv is not None and (pool.kv.num_pages, pool.kv.max_context) == (num_pages, 100)
            assert pool.total_bytes == memory_bytes(pool)


def test_the_longest_context_is_what_all_pages_hold() -> None:
    whole = 6 * (LINE_BYTES + 7 * 4)
    pool = make_hybrid(limit_bytes=whole + 4 * PAGE_BYTES)
    assert pool.kv is not None and pool.page_table is not None
    assert (pool.kv.num_pages, pool.kv.max_context) == (3, 48) and pool.page_table.shape == (6, 3)
    least = 6 * (LINE_BYTES + 1 * 4) + 2 * PAGE_BYTES
    message = f"--state-bytes: expected at least {least} for .* and 2 pages of {PAGE_BYTES}, got a limit of {least - 1}"
    with pytest.raises(ModelError, match=message):
        make_hybrid(limit_bytes=least - 1)


@pytest.mark.parametrize("num_pages", [1, 2, 99, 100, 101, 500])
def test_the_table_is_no_wider_than_there_are_pages(num_pages: int) -> None:
    """Of 5 lines and the null line, whose rows are wider than a page where all 100 pages of a sequence can be had."""
    shapes = [replace(ATTENTION, num_kv_heads=1, head_dim=1, max_positions=100 * 16)]
    options = replace(OPTIONS, page_size=16)
    page_bytes = 2 * 16 * 4
    limit = (num_pages + 1) * page_bytes + 6 * min(num_pages, 100) * 4
    plan = plan_state(shapes, replace(options, limit_bytes=limit), torch.float32)
    assert plan.kv is not None and (plan.kv.num_pages, plan.total_bytes) == (num_pages, limit)
    assert plan.kv.max_context == min(num_pages, 100) * 16
    if num_pages > 1:
        fewer = plan_state(shapes, replace(options, limit_bytes=limit - 1), torch.float32)
        assert fewer.kv is not None and fewer.kv.num_pages == num_pages - 1


@pytest.mark.parametrize("page_size", [0, 8, 48, 8192])
def test_a_page_is_a_power_of_two(page_size: int) -> None:
    with pytest.raises(ModelError, match=f"--page-size: expected a power of two in 16..4096, got {page_size}"):
        plan_state([ATTENTION], replace(OPTIONS, page_size=page_size), torch.float32)


def test_pages_are_put_where_they_are_told_and_go_with_the_line(device: str) -> None:
    pool = make_hybrid(device)
    assert pool.page_table is not None
    entries = torch.tensor([[2, 5, 2, 0, 0], [0, 6, 1, 0, 0], [7, 3, 1, 0, 0]], dtype=torch.int32, device=device)
    pool.put_pages(entries)
    expected = torch.zeros(6, 7, dtype=torch.int32)
    expected[2, 0], expected[5, 6], expected[2, 1] = 7, 3, 1
    assert torch.equal(pool.page_table.cpu(), expected)
    pool.zero(np.array([2]))
    expected[2] = 0
    assert torch.equal(pool.page_table.cpu(), expected)
    with pytest.raises(ValueError, match="new_pages: expected None"):
        make_pool(device).put_pages(entries)


def test_rows_of_the_table_and_copies_of_pages_reach_all_layers_and_nothing_else(device: str) -> None:
    wide = replace(ATTENTION, num_kv_heads=1)
    shapes: list[MixerShape] = [ATTENTION, SHAPE, wide, ATTENTION]
    pool = StatePool(shapes, replace(OPTIONS, page_size=16), dtype=torch.float32, device=torch.device(device))
    caches = [state for state in pool.layers if isinstance(state, KvState)]
    tensors = [tensor for cache in caches for tensor in (cache.k_pages, cache.v_pages)]
    assert [tensor.shape[2] for tensor in tensors] == [2, 2, 1, 1, 2, 2] and pool.page_table is not None
    for tensor in tensors:
        tensor.normal_()
    pool.page_table.fill_(9)
    before = [tensor.clone() for tensor in tensors]
    lines, rows = np.array([2, 4]), np.array([[5, 6, 7], [1, 2, 3]], dtype=np.int32)
    pool.place_rows(torch.tensor(lines, device=device), torch.tensor(rows, device=device))
    pool.copy_pages(torch.tensor([[7, 3, 0], [8, 4, 0]], device=device))
    assert pool.page_table[lines, :3].tolist() == rows.tolist()
    assert (pool.page_table[lines, 3:] == 9).all() and (pool.page_table[[0, 1, 3, 5]] == 9).all()
    for tensor, old in zip(tensors, before, strict=True):
        old[[8, 4]] = old[[7, 3]]
        assert torch.equal(tensor, old)


def test_snapshot_lines_are_counted() -> None:
    options = replace(OPTIONS, snapshot_lines=2)
    pool = make_pool(options=options)
    assert (pool.num_lines, pool.total_bytes) == (7, 8 * 2 * LINE_BYTES)
    assert all(len(tensor) == 8 for layer in pool.layers for tensor in layer.tensors)
    with pytest.raises(ModelError, match="for 5 sequences, 2 snapshots and the null line"):
        make_pool(options=replace(options, limit_bytes=7 * 2 * LINE_BYTES))
    with pytest.raises(ModelError, match="snapshot_lines: expected at least 0, got -1"):
        make_pool(options=replace(options, snapshot_lines=-1))
