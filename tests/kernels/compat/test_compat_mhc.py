"""FlagGems' functions of hyper-connections, and the defects of its own that ours don't have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.mhc_batches import Streams, check_post, check_pre, make_streams
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels.compat import mhc_post, mhc_pre

MANY = 2**31


def post_of(given: Streams, residual: Tensor) -> Tensor:
    return mhc_post(given.x, residual, given.post[:, :, None], given.comb)


def pre_of(given: Streams, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = given.gates
    return mhc_pre(residual, gates.weight, gates.scale, gates.base, 1e-6, 1e-6, 1e-6, 2.0, 20)


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
