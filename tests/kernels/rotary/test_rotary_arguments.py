"""rotate_and_store names the wrong argument, what it expected and what it got."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.paths import Path
from rigs.kernels.rotary_batches import Heads, RotaryBatch, Row, make_rotary_batch
from torch import Tensor

from deltaline_kernels import rotate_and_store

CPU = Path("cpu", torch.float32)


@pytest.fixture
def good() -> RotaryBatch:
    """Five tokens; 4 heads of 16 channels on 2 of keys and of 24 for values."""
    return make_rotary_batch([Row(1), Row(2, 15)], CPU, Heads(DV=24))


def refuse(error: type[Exception], message: str, batch: RotaryBatch, **change: Any) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        replace(batch, **change).run(CPU)


def test_tensors_of_a_wrong_kind(good: RotaryBatch) -> None:
    for name in ("q", "k", "v", "q_norm", "k_norm", "rotary", "k_pages", "v_pages", "page_table"):
        tensor: Tensor = getattr(good, name)
        right = "torch.int32" if name == "page_table" else "torch.float32"
        if name == "q":
            right = "torch.float32 or torch.bfloat16 or torch.float16"
        refuse(TypeError, f"{name}: expected {right}, got torch.float64", good, **{name: tensor.double()})
        refuse(TypeError, f"{name}: expected a tensor, got str", good, **{name: "x"})
        if name != "q":
            refuse(ValueError, f"{name}: expected device cpu, got meta", good, **{name: tensor.to("meta")})
        refuse(ValueError, f"{name}: expected shape [", good, **{name: tensor[None]})
    half = replace(good, q=good.q.half())
    for name in ("k", "v", "k_pages", "v_pages"):
        refuse(TypeError, f"{name}: expected torch.float16, got torch.float32", half)
        half = replace(half, **{name: getattr(half, name).half()})
    assert half.run(CPU).dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("k", (slice(1, None),), "k: expected shape [5, *, 16], got [4, 2, 16]"),
        ("k", (slice(None), slice(None), slice(8)), "k: expected shape [5, *, 16], got [5, 2, 8]"),
        ("k", (slice(None), slice(0)), "v: expected shape [5, 0, *], got [5, 2, 24]"),
        ("v", (slice(1, None),), "v: expected shape [5, 2, *], got [4, 2, 24]"),
        ("v", (slice(None), slice(1)), "v: expected shape [5, 2, *], got [5, 1, 24]"),
        ("q", (slice(None), slice(3)), "q: expected a multiple of 2 heads, got 3"),
        ("q", (slice(None), slice(0)), "q: expected a multiple of 2 heads, got 0"),
        ("q_norm", (slice(1, None),), "q_norm: expected shape [16], got [15]"),
        ("k_norm", (slice(1, None),), "k_norm: expected shape [16], got [15]"),
        ("k_pages", (slice(1, None),), "v_pages: expected shape ["),
        ("k_pages", (slice(None), slice(0)), "k_pages: expected pages of at least 1 token, got 0"),
        ("v_pages", (slice(None), slice(1, None)), "v_pages: expected shape ["),
        ("v_pages", (slice(None), slice(None), slice(1)), "v_pages: expected shape ["),
    ],
)
def test_sizes_that_do_not_fit(good: RotaryBatch, name: str, index: tuple[slice, ...], message: str) -> None:
    refuse(ValueError, message, good, **{name: getattr(good, name)[index].contiguous()})


def test_heads_of_no_or_too_many_channels(good: RotaryBatch) -> None:
    q, k = (tensor.new_zeros(5, tensor.shape[1], 257) for tensor in (good.q, good.k))
    refuse(ValueError, "q: expected heads of 1..256 channels, got 257", good, q=q, k=k)
    v = good.v.new_zeros(5, good.v.shape[1], 513)
    refuse(ValueError, "v: expected heads of 1..512 channels, got 513", good, v=v)
    refuse(ValueError, "v: expected ", good, v=v.new_zeros(5, 2, 0))
    refuse(ValueError, "k: expected at least 1 head, got 0", good, k=k.new_zeros(5, 0, 16), v=v.new_zeros(5, 0, 24))


def test_pages_whose_tokens_are_no_stride_apart(good: RotaryBatch) -> None:
    latents = torch.zeros(*good.k_pages.shape[:2], 2, 40)
    views = {"k_pages": latents[..., 24:], "v_pages": latents[..., :24]}
    refuse(ValueError, "k_pages: expected a contiguous tensor, got strides (", good, **views)  # more than one head
    for other in (good.v_pages.transpose(0, 1).contiguous().transpose(0, 1), good.v_pages.mT.contiguous().mT):
        refuse(ValueError, "v_pages: expected a contiguous tensor, got strides (", good, v_pages=other)


def test_strides_that_do_not_fit(good: RotaryBatch) -> None:
    q = good.q
    refuse(ValueError, "q: expected packed heads, got strides (", good, q=q.mT.contiguous().mT)
    overlapping = torch.zeros(999).as_strided((5, 4, 16), (64, 8, 1))
    refuse(ValueError, "q: expected a head stride of at least 16, got 8", good, q=overlapping)
    interleaved = torch.zeros(4, 5, 16).transpose(0, 1)
    refuse(ValueError, "q: expected a row stride of at least 256, got 16", good, q=interleaved)
    overlapping = torch.zeros(999).as_strided((5, 2, 16), (31, 16, 1))
    refuse(ValueError, "k: expected a row stride of at least 32, got 31", good, k=overlapping)
    for name in ("k", "v"):
        tensor = getattr(good, name)
        apart = torch.cat((tensor, tensor), dim=2)[..., : tensor.shape[2]]
        refuse(ValueError, f"{name}: expected packed rows, got strides (", good, **{name: apart})
    for name in ("rotary", "k_pages", "v_pages", "page_table"):
        tensor = getattr(good, name)
        apart = torch.cat((tensor, tensor), dim=-1)[..., : tensor.shape[-1]]
        refuse(ValueError, f"{name}: expected a contiguous tensor, got strides (", good, **{name: apart})


def test_strides_that_fit(good: RotaryBatch) -> None:
    """Whatever the strides of q, and those of the rows of k and v, the results are the same bits."""
    own = good.clone()
    want = own.run(CPU)
    q = torch.full((5, 6, 40), torch.nan)[:, 1:5, 3:19]
    k, v = torch.full((5, 50), torch.nan)[:, 7:39].unflatten(1, (2, 16)), torch.full((5, 60), torch.nan)
    v = v[:, :48].unflatten(1, (2, 24))
    for strided, tensor in ((q, good.q), (k, good.k), (v, good.v)):
        strided.copy_(tensor)
    other = replace(good.clone(), q=q, k=k, v=v)
    assert torch.equal(other.run(CPU), want)
    assert torch.equal(other.k_pages.nan_to_num(7.0), own.k_pages.nan_to_num(7.0))


@pytest.mark.parametrize("channels", [0, 1, 7, 18])
def test_channels_that_do_not_turn_in_pairs(good: RotaryBatch, channels: int) -> None:
    message = f"rotary: expected an even number of channels, 2..16, got {channels}"
    refuse(ValueError, message, good, rotary=torch.zeros(40, channels))


def test_eps_and_rows_of_a_wrong_kind(good: RotaryBatch) -> None:
    refuse(TypeError, "eps: expected a number, got NoneType", good, eps=None)
    for eps in (0.0, -1e-6, float("nan"), float("inf")):
        refuse(ValueError, f"eps: expected a positive number, got {eps}", good, eps=eps)
    refuse(TypeError, "rows: expected Rows, got Tensor", good, rows=good.rows.control)
    away = replace(good.rows, control=good.rows.control.to("meta"))
    refuse(ValueError, "rows: expected device cpu, got meta", good, rows=away)


def test_what_is_refused_leaves_the_pages_alone(good: RotaryBatch) -> None:
    inputs: list[Any] = list(good.inputs)
    inputs[9] = good.page_table.long()
    with pytest.raises(TypeError, match=r"^page_table: expected"):
        rotate_and_store(*inputs)
    assert good.k_pages.isnan().all() and good.v_pages.isnan().all()
