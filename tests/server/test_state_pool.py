"""The pool's sizes, and that zeroing lines reaches all of them and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaline_server.keys import ModelError
from deltaline_server.mixer_shape import GatedDeltaNetShape, Mamba2Shape
from deltaline_server.state_pool import StateOptions, StatePool, plan_state

SHAPE = GatedDeltaNetShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=4, conv_width=4)
OPTIONS = StateOptions(num_lines=5, max_draft=3)
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


def test_shapes_and_dtypes() -> None:
    pool = make_pool()
    assert len(pool.layers) == 2
    for layer in pool.layers:
        assert (layer.conv.shape, layer.conv.dtype) == ((6, 6, 48), torch.bfloat16)
        assert (layer.recurrent.shape, layer.recurrent.dtype) == ((6, 4, 4, 8), torch.float32)
        assert (layer.drafts.shape, layer.drafts.dtype) == ((6, 2, 3, 36), torch.float32)


def test_shapes_of_mamba2() -> None:
    shape = Mamba2Shape(2, 4, 8, 16, 4, 1, (0.0, math.inf), has_conv_bias=True, has_bias=False)
    pool = StatePool([shape], OPTIONS, dtype=torch.bfloat16, device=torch.device("cpu"))
    (layer,) = pool.layers
    assert (layer.conv.shape, layer.conv.dtype) == ((6, 6, 96), torch.bfloat16)
    assert (layer.recurrent.shape, layer.recurrent.dtype) == ((6, 4, 8, 16), torch.float32)
    assert (layer.drafts.shape, layer.drafts.dtype) == ((6, 2, 3, 32 + 32 + 4), torch.float32)
    assert pool.total_bytes == sum(tensor.nbytes for tensor in tensors_in(pool))


def test_bytes_are_those_of_the_tensors() -> None:
    pool = make_pool()
    assert pool.bytes_per_sequence == 2 * LINE_BYTES
    assert pool.total_bytes == sum(tensor.nbytes for tensor in tensors_in(pool))
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
    pool = make_pool(device)
    found = list(tensors_in(pool))
    assert len(found) == 6
    for tensor in found:
        tensor.fill_(7)
    pool.zero(np.array(lines, dtype=np.int64))
    for tensor in found:
        for line in range(6):
            assert bool((tensor[line] == (0 if line in lines else 7)).all())


def test_zero_also_ends_what_is_not_finite(device: str) -> None:
    pool = make_pool(device)
    for tensor in tensors_in(pool):
        tensor.fill_(float("nan"))
    pool.zero(np.array([4]))
    assert all(bool((tensor[4] == 0).all()) for tensor in tensors_in(pool))


@pytest.mark.parametrize("lines", [[1, 6], [-1, 1]], ids=str)
def test_zero_of_a_line_that_is_none_changes_nothing(lines: list[int]) -> None:
    pool = make_pool()
    for tensor in tensors_in(pool):
        tensor.fill_(7)
    with pytest.raises(IndexError, match=r"lines: expected 0\.\.5"):
        pool.zero(np.array(lines))
    assert all(bool((tensor == 7).all()) for tensor in tensors_in(pool))
