"""Hyper-connections as FlagGems, vLLM and SGLang call them, and defects of theirs that ours don't have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.mhc_batches import Streams, check_post, check_post_pre, check_pre, make_streams
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import mhc_pre_reference
from deltaline_kernels.compat import mhc_fused_post_pre, mhc_post, mhc_pre

MANY = 2**31


def post_of(given: Streams, residual: Tensor) -> Tensor:
    return mhc_post(given.x, residual, given.post[:, :, None], given.comb)


def pre_of(given: Streams, residual: Tensor, *last: Any, **told: Any) -> tuple[Tensor, Tensor, Tensor]:
    gates = given.gates
    return mhc_pre(residual, gates.weight, gates.scale, gates.base, 1e-6, 1e-6, 1e-6, 2.0, 20, *last, **told)


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_the_fields_functions_match_the_reference(path: Path, streams: int) -> None:
    given = make_streams(7, streams, 72, path)
    check_post(post_of(given, given.residual), given)
    post, comb, y = pre_of(given, given.residual)
    assert post.shape == (7, streams, 1) and comb.shape == (7, streams, streams) and y.shape == (7, 72)
    check_pre((y, post[..., 0], comb), given)


def test_tokens_have_two_dimensions_too(path: Path) -> None:
    """As other engines store them: `[batch, length, streams, channels]`."""
    given = make_streams(6, 4, 72, path)
    gates, residual = given.gates, given.residual.view(2, 3, 4, 72)
    got = mhc_post(given.x.view(2, 3, 72), residual, given.post.view(2, 3, 4), given.comb.view(2, 3, 4, 4))
    assert got.shape == residual.shape
    check_post(got.view(6, 4, 72), given)
    post, comb, y = mhc_pre(residual, gates.weight, gates.scale, gates.base, 1e-6, 1e-6, 1e-6, 2.0, 20, n_splits=8)
    assert post.shape == (2, 3, 4, 1) and comb.shape == (2, 3, 4, 4) and y.shape == (2, 3, 72)
    check_pre((y.view(6, 72), post.view(6, 4), comb.view(6, 4, 4)), given)


def test_no_tokens(path: Path) -> None:
    given = make_streams(0, 4, 72, path)
    assert post_of(given, given.residual).shape == (0, 4, 72)
    assert [t.shape for t in pre_of(given, given.residual)] == [(0, 4, 1), (0, 4, 4), (0, 72)]


def fused_of(given: Streams, *last: Any, **told: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gates, mixed = given.gates, (given.x, given.residual, given.post[..., None], given.comb)
    return mhc_fused_post_pre(*mixed, gates.weight, gates.scale, gates.base, 1e-6, 1e-6, 1e-6, 2.0, 20, *last, **told)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_input_is_normalised(path: Path, dtype: torch.dtype) -> None:
    """By vLLM's places, and by SGLang's names; weights of 16 bits are widened."""
    given = make_streams(7, 4, 72, path)
    norm = given.norm.to(dtype)
    by_place = pre_of(given, given.residual, 1, norm, 1e-6)
    by_name = pre_of(given, given.residual, norm_weight=norm, norm_eps=1e-6)
    without = pre_of(given, given.residual, norm_weight=None, norm_eps=None)
    for (post, comb, y), weight in ((by_place, norm.float()), (by_name, norm.float()), (without, None)):
        check_pre((y, post[..., 0], comb), given, weight)


def test_what_is_added_to_the_mean_square_is_told(path: Path) -> None:
    given = make_streams(7, 4, 72, path)
    _, _, y = pre_of(given, given.residual, norm_weight=given.norm, norm_eps=0.5)
    exact = given.exact().residual
    want = mhc_pre_reference(exact, given.gates, norm_weight=given.norm, norm_eps=0.5)
    assert_close("y", y, want[0], path.dtype)


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_the_fused_call_is_both(path: Path, num_tokens: int, has_norm: bool) -> None:
    given = make_streams(num_tokens, 4, 72, path)
    norm, eps = (given.norm.bfloat16(), 1e-6) if has_norm else (None, None)
    for got in (fused_of(given, norm_weight=norm, norm_eps=eps), fused_of(given, 1, 1, norm, eps)):
        residual, post, comb, y = got
        assert post.shape == (num_tokens, 4, 1)
        check_post_pre((residual, y, post[..., 0], comb), given, None if norm is None else norm.float())
        assert torch.equal(residual, post_of(given, given.residual))


def test_the_fused_call_takes_two_dimensions_of_tokens(path: Path) -> None:
    given = make_streams(6, 4, 72, path)
    parts = given.x, given.residual, given.post, given.comb
    x, residual, post, comb = (part.unflatten(0, (2, 3)) for part in parts)
    got = fused_of(replace(given, x=x, residual=residual, post=post, comb=comb))
    assert [t.shape for t in got] == [(2, 3, 4, 72), (2, 3, 4, 1), (2, 3, 4, 4), (2, 3, 72)]
    residual, post, comb, y = (part.flatten(0, 1) for part in got)
    check_post_pre((residual, y, post[..., 0], comb), given)


def test_a_wrong_norm_is_named(path: Path) -> None:
    given = make_streams(5, 4, 72, path)
    wrong: list[tuple[type[Exception], str, Any, Any]] = [
        (ValueError, r"norm_weight: expected shape \(72,\), got \(71,\)", given.norm[1:], 1e-6),
        (TypeError, "norm_weight: expected torch.float32", given.norm.double(), 1e-6),
        (TypeError, "norm_weight: expected a tensor, got float", 1e-6, 1e-6),
        (TypeError, "norm_eps: expected a number, got NoneType", given.norm, None),
        (ValueError, "norm_eps: expected at least 0, got -1.0", given.norm, -1.0),
    ]
    for error, message, norm, eps in wrong:
        with pytest.raises(error, match=f"^{message}"):
            fused_of(given, norm_weight=norm, norm_eps=eps)
    with pytest.raises(ValueError, match=r"^tile_n: expected"):
        fused_of(given, tile_n=0)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_flag_gems_wrong_result_for_a_residual_that_is_not_contiguous(path: Path, order: tuple[int, int, int]) -> None:
    """It writes in one order to memory that it makes in another: `empty_like` keeps strides."""
    given = make_streams(5, 4, 72, path)
    residual = given.residual.permute(order).contiguous().permute(tuple(order.index(i) for i in range(3)))
    assert not residual.is_contiguous() and torch.equal(residual, given.residual)
    check_post(post_of(given, residual), given)
    post, comb, y = pre_of(given, residual)
    check_pre((y, post[..., 0], comb), given)


def test_gates_that_are_not_contiguous(path: Path) -> None:
    """comb transposed in memory: which index is summed over does not follow from strides."""
    given = make_streams(5, 4, 72, path)
    comb = given.comb.transpose(1, 2).contiguous().transpose(1, 2)
    post = given.post.t().contiguous().t()
    assert not comb.is_contiguous() and not post.is_contiguous()
    check_post(mhc_post(given.x, given.residual, post, comb), given)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [4096, 7168])
def test_flag_gems_overflow_above_2_31_elements(channels: int) -> None:
    """Its offsets are 32 bits wide: from 131,073 tokens of 4,096 channels on; about 12 GB."""
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB of GPU memory")
    path, last = Path("cuda", torch.bfloat16), 5
    num_tokens = MANY // (4 * channels) + 9
    few = make_streams(last, 4, channels, path)
    many = {
        name: getattr(few, name).new_zeros(num_tokens, *getattr(few, name).shape[1:])
        for name in ("x", "residual", "post", "comb")
    }
    for name, tensor in many.items():
        tensor[-last:] = getattr(few, name)
    assert many["residual"].numel() > MANY
    got = mhc_post(
        **{"x": many["x"], "residual": many["residual"]}, post_layer_mix=many["post"], comb_res_mix=many["comb"]
    )
    check_post(got[-last:].contiguous(), few)
    assert not got[:-last].any()
    del got
    post, comb, y = pre_of(few, many["residual"])
    check_pre((y[-last:], post[-last:, :, 0], comb[-last:]), few)


def test_numbers_are_refused_by_the_names_of_this_call(path: Path) -> None:
    """Not by those of Gates, which has others for the same."""
    given = make_streams(5, 4, 72, path)
    gates = given.gates
    right: dict[str, Any] = {"rms_eps": 1e-6, "hc_pre_eps": 1e-6, "hc_sinkhorn_eps": 1e-6, "hc_post_mult_value": 2.0}
    for name, wrong in (("hc_pre_eps", -1.0), ("hc_sinkhorn_eps", -1.0), ("hc_post_mult_value", float("inf"))):
        numbers = right | {name: wrong}
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {wrong}$"):
            mhc_pre(given.residual, gates.weight, gates.scale, gates.base, **numbers, sinkhorn_repeat=20)
