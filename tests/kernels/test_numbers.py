"""Numbers of the host may be ints: Triton would make a constant of 1, and another type of any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.compiled import compile_launches
from rigs.kernels.draws import normal
from rigs.kernels.field_lora import metadata
from torch import Tensor

from deltaline_kernels import (
    Modifiers,
    Rows,
    add_rms_norm,
    compat,
    find_modifier,
    flex_decode,
    gated_delta,
    gated_rms_norm,
    kda,
    mamba2,
    mhc_head,
    mhc_post_pre,
    mhc_pre,
    prepare_gates,
    rms_norm,
    rotate_and_store,
)

# Tokens of two rows, one of them short.
LENGTHS, T = [1, 70], 71
BF16 = torch.bfloat16


def draw(device: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return normal(*shape).to(device, dtype)


def fp32(device: str, *shape: int) -> Tensor:
    return draw(device, *shape, dtype=torch.float32)


def ints(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def make_rows(device: str) -> Rows:
    return Rows.build(LENGTHS, [1, 0], [1, 2], LENGTHS, [0, 0], [0, 0], max_short=4, device=device)


def delta(device: str, one: float) -> list[Tensor]:
    state, drafts = fp32(device, 3, 2, 16, 16), torch.zeros(3, 2, 4, 50, device=device)
    gates = (draw(device, T, 2), draw(device, T, 2), fp32(device, 2), fp32(device, 2))
    o = gated_delta(draw(device, T, 64), *gates, state, drafts, make_rows(device), num_key_heads=1, scale=one, eps=one)
    return [o, state]


def ssd(device: str, one: float) -> list[Tensor]:
    state, drafts = fp32(device, 3, 2, 16, 16), torch.zeros(3, 2, 4, 50, device=device)
    weights = (fp32(device, 2), fp32(device, 2), fp32(device, 2))
    told = (draw(device, T, 64), draw(device, T, 2), *weights, state, drafts, make_rows(device))
    return [mamba2(*told, num_groups=1, dt_limit=(one - one, one)), state]


def norm(device: str, one: float) -> list[Tensor]:
    return [gated_rms_norm(draw(device, 3, 2, 16), draw(device, 3, 2, 16), fp32(device, 16), one)]


def hidden_norms(device: str, one: float) -> list[Tensor]:
    x, residual, weight = draw(device, 3, 32), draw(device, 3, 32), fp32(device, 32)
    return [rms_norm(x, weight, one), *add_rms_norm(x, residual, weight, one, scale=one)]


def make_pages(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return pages of keys and of values, and the table of three lines."""
    return draw(device, 15, 16, 1, 16), draw(device, 15, 16, 1, 16), ints(device, *range(15)).view(3, 5)


def rotary(device: str, one: float) -> list[Tensor]:
    q, k, v = (draw(device, T, heads, 16) for heads in (2, 1, 1))
    keys, values, table = make_pages(device)
    weight, angles = fp32(device, 16), fp32(device, 80, 8)
    q = rotate_and_store(q, k, v, weight, weight, one, angles, keys, values, table, make_rows(device))
    return [q, keys, values]


def attention(device: str, one: float) -> list[Tensor]:
    scores = [find_modifier(name)(one) for name in ("alibi", "soft_cap")]
    modifiers = Modifiers(scores, find_modifier("sliding_window")(one), device=device)
    q, rows = draw(device, T, 2, 16), make_rows(device)
    return [*flex_decode(q, *make_pages(device), rows, modifiers=modifiers, scale=one, return_lse=True)]


def dense_attention(device: str, one: float) -> list[Tensor]:
    q, k, v = (draw(device, 1, heads, 3, 16) for heads in (2, 1, 1))
    score = find_modifier("soft_cap")(one)
    return [*compat.flex_decoding(q, k, v, score_mod=score, scale=one, return_lse=True)]


def streams(device: str, one: float) -> list[Tensor]:
    mix, scale, base = fp32(device, 8, 64), fp32(device, 3), fp32(device, 8)
    numbers: dict[str, Any] = dict.fromkeys(("rms_eps", "pre_eps", "sinkhorn_eps", "post_multiplier"), one)
    gates = prepare_gates(mix, scale, base, sinkhorn_repeat=1, **numbers)
    residual, x, weight = draw(device, 3, 2, 32), draw(device, 3, 32), fp32(device, 32)
    y, post, comb = mhc_pre(residual, gates, norm_weight=weight, norm_eps=one)
    both = mhc_post_pre(x, residual, post, comb, gates, norm_weight=weight, norm_eps=one)
    head = mhc_head(residual, mix[:2], scale[:1], base[:2], one, one)
    return [y, *both, head]


def keyed_delta(device: str, one: float) -> list[Tensor]:
    state, drafts = fp32(device, 3, 2, 16, 16), torch.zeros(3, 2, 4, 80, device=device)
    gates = (draw(device, T, 32), draw(device, T, 2), fp32(device, 2), fp32(device, 32))
    told: dict[str, Any] = {"num_key_heads": 1, "scale": one, "eps": one, "lower_bound": -one}
    return [kda(draw(device, T, 64), *gates, state, drafts, make_rows(device), **told), state]


def keyed_rules_of_engines(device: str, one: float) -> list[Tensor]:
    q, k, v = (draw(device, 1, T, 2, 16) for _ in range(3))
    g, beta, out = draw(device, 1, T, 2, 16), draw(device, 1, T, 2), torch.empty_like(v)
    weights, pool = (fp32(device, 2), fp32(device, 32)), fp32(device, 3, 2, 16, 16)
    compat.flash_kda_fwd(q, k, v, g, beta, one, out, *weights, -one)
    o, _ = compat.chunk_kda(q, k, v, -g.abs(), beta.sigmoid(), one)
    last = compat.fused_sigmoid_gating_delta_rule_update(
        weights[0], g, weights[1], one, 20 * one, q, k, v, beta, pool, ints(device, 1), is_kda=True, lower_bound=-one
    )
    return [out, o, last, pool, compat.fused_kda_gate(g, lower_bound=-one)]


def streams_of_engines(device: str, one: float) -> list[Tensor]:
    parameters = (fp32(device, 8, 64), fp32(device, 3), fp32(device, 8))
    return list(compat.mhc_pre(draw(device, 3, 2, 32), *parameters, one, one, one, one, 1))


def rules_of_engines(device: str, one: float) -> list[Tensor]:
    q, k, v = (draw(device, 1, T, heads, 16) for heads in (1, 1, 2))
    g, beta = -fp32(device, 1, T, 2).abs(), fp32(device, 1, T, 2)
    pool, slots, weights = fp32(device, 3, 2, 16, 16), ints(device, 1), (fp32(device, 2), fp32(device, 2))
    o, _ = compat.chunk_gated_delta_rule(q, k, v, g, beta, one, use_qk_l2norm_in_kernel=True)
    other, _ = compat.fused_recurrent_gated_delta_rule(q, k, v, g, beta, one)
    a, decay = draw(device, 1, T, 2), (one, 20 * one)
    last = compat.fused_sigmoid_gating_delta_rule_update(
        weights[0], a, weights[1], *decay, q, k, v, a, pool, slots, one
    )
    return [o, other, last, pool]


def scan_of_engines(device: str, one: float) -> list[Tensor]:
    x, B, out = draw(device, T, 2, 16), draw(device, T, 1, 16), draw(device, T, 2, 16)
    starts = ints(device, 0, T)
    told: dict[str, Any] = {"dt_softplus": True, "dt_limit": (one - one, one)}
    A = -fp32(device, 2).abs()
    final = compat.mamba_chunk_scan_combined_varlen(
        x, draw(device, T, 2), A, B, B, 64, starts, None, None, None, out, **told
    )
    assert final is not None
    return [out, final]


def lora_of_engines(device: str, one: float) -> list[Tensor]:
    sums = fp32(device, 1, 3, 8)
    compat.lora_shrink(
        draw(device, 3, 32), [draw(device, 2, 8, 32)], sums, **metadata([0, 1, 1], 2, device), scaling=one
    )
    return [sums]


CALLS: dict[str, Callable[[str, float], list[Tensor]]] = {
    call.__name__: call
    for call in (
        delta,
        keyed_delta,
        ssd,
        norm,
        hidden_norms,
        rotary,
        attention,
        dense_attention,
        streams,
        streams_of_engines,
        rules_of_engines,
        keyed_rules_of_engines,
        scan_of_engines,
        lora_of_engines,
    )
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_int_is_taken_for_a_number(device: str, call: Callable[[str, float], list[Tensor]]) -> None:
    for got, want in zip(call(device, 1), call(device, 1.0), strict=True):
        assert torch.equal(got, want) and not got.isnan().any()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_int_launches_what_a_float_does(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[str, float], list[Tensor]]
) -> None:
    """On a Hopper GPU, for which the kernels are compiled here."""
    pytest.importorskip("triton")
    compiled = (compile_launches(monkeypatch, partial(call, "meta", one)) for one in (1, 1.0))
    launched = [[kernel.hash for kernel in kernels] for kernels in compiled]
    assert launched[0] and launched[0] == launched[1]
