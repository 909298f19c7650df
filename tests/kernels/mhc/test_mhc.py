"""Hyper-connections against their reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.mhc_batches import (
    check_head,
    check_post,
    check_post_pre,
    check_pre,
    make_streams,
    reference_of_both,
    run_head,
    run_post,
    run_post_pre,
    run_pre,
)
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import mhc_pre

# Tokens, streams and channels.
SHAPES = {
    "one-token": (1, 4, 200),
    "empty": (0, 4, 200),
    "one-stream": (7, 1, 200),
    "two-streams": (7, 2, 1280),
    "three-streams": (7, 3, 200),
    "four-streams": (7, 4, 1280),
    "five-streams": (2, 5, 40),
    "eight-streams": (7, 8, 200),
    "64-tokens": (64, 4, 200),
    "one-channel": (3, 4, 1),
}
LARGE = {
    **{f"{n}-tokens": (n, 4, 4096) for n in (1, 7, 64, 4096)},
    **{f"{n}-tokens-7168": (n, 4, 7168) for n in (1, 64, 4096)},
    **{f"{s}-streams-7168": (64, s, 7168) for s in (1, 2, 3, 8)},
    **{f"{s}-streams-4096-tokens": (4096, s, 1280) for s in (1, 2, 3, 8)},
    **{f"{n}-tokens-1280": (n, 4, 1280) for n in (17, 65, 256, 257, 513, 1000)},
}


def check_all(path: Path, shape: tuple[int, int, int], normed: bool) -> None:
    given = make_streams(*shape, path)
    norm = given.norm if normed else None
    check_pre(run_pre(path, given, norm), given, norm)
    check_post(run_post(path, given), given)
    check_post_pre(run_post_pre(path, given, norm), given, norm)
    check_head(run_head(path, given), given)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mhc_matches_the_reference(path: Path, shape: str, normed: bool) -> None:
    check_all(path, SHAPES[shape], normed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", LARGE)
def test_mhc_of_large_batches_matches_the_reference(shape: str, dtype: torch.dtype) -> None:
    check_all(Path("cuda", dtype), LARGE[shape], normed=shape.endswith("7168"))


def test_both_at_once_are_one_behind_the_other(exact_path: Path) -> None:
    given = make_streams(5, 4, 96, exact_path)
    for name, got, want in zip("rypc", run_post_pre(exact_path, given), reference_of_both(given), strict=True):
        assert_close(name, got, want, torch.float32)


def test_mhc_takes_rows_apart(path: Path) -> None:
    """Tokens of a larger tensor, whose rows are not neighbours."""
    wide = make_streams(6, 4, 72, path)
    given = replace(wide, x=wide.x[::2, :72], residual=wide.residual[::2], post=wide.post[:3], comb=wide.comb[:3])
    assert not given.residual.is_contiguous() and not given.x.is_contiguous()
    check_pre(run_pre(path, given), given)
    check_post(run_post(path, given), given)
    check_post_pre(run_post_pre(path, given), given)
    check_head(run_head(path, given), given)


@pytest.mark.parametrize("count", [17, 40])
def test_a_token_does_not_depend_on_its_company(path: Path, count: int) -> None:
    """Bitwise, whatever other tokens hold and however many there are in the bucket."""
    given = make_streams(count, 4, 72, path)
    other = make_streams(count, 4, 72, path, seed=1)
    for run in (run_pre, run_post_pre):
        want = run(path, given)
        for repeated, one in zip(run(path, given), want, strict=True):
            assert torch.equal(repeated, one)
        for i in (0, 16, count - 1):
            mixed = other.take(slice(None))
            for name in ("x", "residual", "post", "comb"):
                getattr(mixed, name)[i] = getattr(given, name)[i]
            for got, one in zip(run(path, replace(mixed, gates=given.gates)), want, strict=True):
                assert torch.equal(got[i], one[i])
        for got, one in zip(run(path, given.take(slice(0, 17))), want, strict=True):
            assert torch.equal(got, one[:17])
    assert torch.equal(run_post(path, given)[3:5], run_post(path, given.take(slice(3, 5))))


def test_tokens_of_nothing_give_no_nan(path: Path) -> None:
    """As a graph's tokens behind the last row: zeros, which stay zeros in the streams."""
    given = make_streams(3, 4, 72, path)
    given.residual[1:], given.x[1:] = 0, 0
    mixed, y, post, comb = run_post_pre(path, given, given.norm)
    assert not mixed[1:].any() and not y[1:].any()
    assert post.isfinite().all() and comb.isfinite().all() and y.isfinite().all()


def test_a_token_of_nan_is_alone(path: Path) -> None:
    given = make_streams(5, 4, 72, path)
    want = run_pre(path, given)
    given.residual[2] = torch.nan
    got = run_pre(path, given)
    for one, other in zip(got, want, strict=True):
        assert one[2].isnan().all()
        assert torch.equal(one[[0, 1, 3, 4]], other[[0, 1, 3, 4]])


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_comb_of_far_apart_logits_has_columns_of_sum_one(path: Path, streams: int) -> None:
    given = make_streams(6, streams, 64, path, spread=20.0)
    got = run_pre(path, given)
    check_pre(got, given)
    assert_close("columns", got[2].sum(1), torch.ones(6, streams), torch.float32)


@pytest.mark.parametrize("repeat", [1, 2, 5])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
def test_gates_have_their_own_numbers(exact_path: Path, repeat: int, eps: float) -> None:
    """The first normalisation of columns counts; each eps has its place."""
    given = make_streams(4, 3, 40, exact_path)
    gates = replace(given.gates, rms_eps=0.3, pre_eps=0.2, sinkhorn_eps=eps, post_multiplier=1.5)
    given = replace(given, gates=replace(gates, sinkhorn_repeat=repeat))
    check_pre(run_pre(exact_path, given), given)


def test_streams_of_any_size_are_normed(exact_path: Path) -> None:
    """The products are those of streams of length 1, however large they are; the input keeps its size."""
    given = make_streams(4, 4, 64, exact_path)
    y, post, comb = run_pre(exact_path, given)
    large = run_pre(exact_path, replace(given, residual=given.residual * 1024))
    for got, want in zip(large, (y * 1024, post, comb), strict=True):
        assert_close("large", got, want, torch.float32)


def test_weights_are_those_of_fp32(path: Path) -> None:
    """A weight's low bits count: products with weights that are equal in 16 bits differ."""
    given = make_streams(2, 4, 64, path)
    weight = torch.full_like(given.gates.weight, 1.0)
    weight[:, ::2] += 2.0**-18
    weight[:, 1::2] *= -1
    residual = torch.ones_like(given.residual)
    gates = replace(given.gates, weight=weight, scale=torch.full_like(given.gates.scale, 1000.0))
    given = replace(given, gates=gates, residual=residual)
    _, post, _ = got = run_pre(path, given)
    check_pre(got, given)
    zero = run_pre(path, replace(given, gates=replace(gates, weight=torch.zeros_like(weight))))[1]
    # 128 pairs leave 2**-18 each: 2**-11 of logits, and a thousand times that.
    assert float((post - zero).abs().amax()) > 0.05


def test_pre_writes_where_it_is_told(exact_path: Path) -> None:
    given = make_streams(3, 4, 40, exact_path)
    out = torch.full_like(given.x, torch.nan)
    y, _, _ = mhc_pre(given.residual, given.gates, out=out)
    assert y is out
    assert torch.equal(out, mhc_pre(given.residual, given.gates)[0])
