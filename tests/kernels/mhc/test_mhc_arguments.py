"""What hyper-connections say of wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaline_kernels import Gates, compat, mhc_head, mhc_post, mhc_post_pre, mhc_pre, prepare_gates

N, S, H = 3, 2, 8
ROWS = S * (2 + S)


def zeros(*size: int) -> Tensor:
    return torch.zeros(size)


def good_gates() -> dict[str, Any]:
    return {"weight": zeros(ROWS, S * H), "scale": zeros(3), "base": zeros(ROWS)}


GATES = Gates(**good_gates())
RESIDUAL = {"residual": zeros(N, S, H)}
MIXED = {"x": zeros(N, H), **RESIDUAL, "post": zeros(N, S), "comb": zeros(N, S, S)}
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    mhc_pre: {**RESIDUAL, "gates": GATES},
    mhc_post: MIXED,
    mhc_post_pre: {**MIXED, "gates": GATES},
    mhc_head: {**RESIDUAL, "weight": zeros(S, S * H), "scale": zeros(1), "base": zeros(S)},
    Gates: good_gates(),
    prepare_gates: good_gates(),
    compat.mhc_post: {
        "x": zeros(N, H),
        **RESIDUAL,
        "post_layer_mix": zeros(N, S, 1),
        "comb_res_mix": zeros(N, S, S),
    },
    compat.mhc_pre: {
        **RESIDUAL,
        "fn": zeros(ROWS, S * H),
        "hc_scale": zeros(3),
        "hc_base": zeros(ROWS),
        "rms_eps": 1e-6,
        "hc_pre_eps": 1e-6,
        "hc_sinkhorn_eps": 1e-6,
        "hc_post_mult_value": 2.0,
        "sinkhorn_repeat": 20,
    },
}
WRONG: list[tuple[Callable[..., Any], type[Exception], str, dict[str, Any]]] = [
    (mhc_pre, TypeError, "residual: expected a tensor, got list", {"residual": [1.0]}),
    (mhc_pre, ValueError, "residual: expected shape", {"residual": zeros(N, S * H)}),
    (mhc_pre, ValueError, "residual: expected packed rows", {"residual": zeros(N, H, S).transpose(1, 2)}),
    (mhc_pre, ValueError, "residual: expected 1..8 streams", {"residual": zeros(N, 9, H)}),
    (mhc_pre, TypeError, "gates: expected Gates, got dict", {"gates": good_gates()}),
    (mhc_pre, ValueError, "gates: expected those of 2 streams of 9 channels, got those", {"residual": zeros(N, S, 9)}),
    (
        mhc_pre,
        ValueError,
        "gates: expected device cpu, got meta",
        {"gates": Gates(**{k: v.to("meta") for k, v in good_gates().items()})},
    ),
    (mhc_pre, ValueError, "norm_weight: expected shape .8., got .7.", {"norm_weight": zeros(7)}),
    (mhc_pre, ValueError, "norm_eps: expected at least 0", {"norm_weight": zeros(H), "norm_eps": -1.0}),
    (mhc_pre, ValueError, "out: expected shape", {"out": zeros(N, H + 1)}),
    (mhc_post, ValueError, "x: expected shape", {"x": zeros(N, S, H)}),
    (mhc_post, TypeError, "x: expected torch.float32, got torch.bfloat16", {"x": zeros(N, H).bfloat16()}),
    (mhc_post, ValueError, "post: expected shape", {"post": zeros(N, S, 1)}),
    (mhc_post, ValueError, "comb: expected a contiguous", {"comb": zeros(N, S, S).transpose(1, 2)}),
    (mhc_post_pre, ValueError, "x: expected shape", {"x": zeros(N + 1, H)}),
    (mhc_head, ValueError, "weight: expected shape .2, 16.", {"weight": zeros(ROWS, S * H)}),
    (mhc_head, ValueError, "scale: expected shape .1.", {"scale": zeros(3)}),
    (mhc_head, ValueError, "base: expected shape .2.", {"base": zeros(3)}),
    (mhc_head, ValueError, "pre_eps: expected a finite number", {"pre_eps": float("nan")}),
    (Gates, TypeError, "weight: expected torch.float32, got torch.bfloat16", {"weight": zeros(ROWS, S * H).bfloat16()}),
    (Gates, ValueError, "weight: expected S . .2 . S. rows for S = 1..8 streams, got 7", {"weight": zeros(7, 16)}),
    (Gates, ValueError, "weight: expected columns for 2 streams", {"weight": zeros(ROWS, 15)}),
    (Gates, ValueError, "scale: expected shape .3.", {"scale": zeros(1)}),
    (Gates, ValueError, "base: expected shape .8.", {"base": zeros(7)}),
    (Gates, TypeError, "rms_eps: expected a number, got str", {"rms_eps": "1"}),
    (Gates, ValueError, "pre_eps: expected at least 0, got -1", {"pre_eps": -1.0}),
    (Gates, ValueError, "sinkhorn_eps: expected a finite number, got inf", {"sinkhorn_eps": float("inf")}),
    (Gates, ValueError, "rms_eps: expected a finite number, got 1000", {"rms_eps": 10**400}),
    (Gates, ValueError, "post_multiplier: expected a finite number", {"post_multiplier": float("nan")}),
    (Gates, ValueError, "sinkhorn_repeat: expected at least 1, got 0", {"sinkhorn_repeat": 0}),
    (Gates, TypeError, "sinkhorn_repeat: expected an integer", {"sinkhorn_repeat": 2.0}),
    (prepare_gates, TypeError, "weight: expected a tensor, got list", {"weight": [1.0]}),
    (prepare_gates, TypeError, "base: expected torch.float32 or", {"base": torch.zeros(ROWS, dtype=torch.int32)}),
    (compat.mhc_post, ValueError, "residual: expected shape .N, S, H. or", {"residual": zeros(N, S * H)}),
    (compat.mhc_post, ValueError, "x: expected shape .3, 8., got .24,.", {"x": zeros(N * H)}),
    (compat.mhc_post, ValueError, "post_layer_mix: expected shape .3, 2. or .3, 2", {"post_layer_mix": zeros(N, 1, S)}),
    (compat.mhc_post, TypeError, "comb_res_mix: expected torch.float32", {"comb_res_mix": zeros(N, S, S).bfloat16()}),
    (compat.mhc_pre, ValueError, "fn: expected shape", {"fn": zeros(ROWS, S * H + 2)}),
    (compat.mhc_pre, ValueError, "hc_scale: expected shape", {"hc_scale": zeros(1)}),
    (compat.mhc_pre, ValueError, "hc_base: expected shape", {"hc_base": zeros(3)}),
    (compat.mhc_pre, TypeError, "n_splits: expected an integer", {"n_splits": 1.0}),
]


@pytest.mark.parametrize(("function", "error", "message", "change"), WRONG, ids=[message for _, _, message, _ in WRONG])
def test_the_wrong_argument_is_named(
    function: Callable[..., Any], error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    good = GOOD[function]
    function(**good)
    with pytest.raises(error, match="^" + message):
        function(**(good | change))


def test_parameters_of_16_bits_are_cast() -> None:
    """A checkpoint's bf16 parameters, and views: never read as if they were fp32."""
    weight = torch.randn(ROWS, S * H).bfloat16()
    made = prepare_gates(weight, torch.randn(3).half(), torch.randn(2, ROWS).t()[:, 0])
    assert torch.equal(made.weight, weight.float())
    assert made.scale.dtype == made.base.dtype == torch.float32 and made.base.is_contiguous()
    assert (made.num_streams, made.hidden) == (S, H)


def test_gates_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        GATES.rms_eps = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="rms_eps"):
        replace(GATES, rms_eps=-1.0)
