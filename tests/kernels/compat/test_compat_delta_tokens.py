"""The engines' gated delta rule and its tokens: where they lie, their dtypes, their heads, and how fla calls it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.delta_calls import Case, good_chunk, good_rows, good_update, make_call, make_states
from rigs.kernels.delta_samples import kda_call
from rigs.kernels.field_recurrence import field_rows
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    fused_sigmoid_gating_delta_rule_update,
)
from deltaline_kernels.compat.delta_rule import sequences
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs

CHUNK: Any = chunk_gated_delta_rule
ROW: Any = fused_recurrent_gated_delta_rule
UPDATE: Any = fused_sigmoid_gating_delta_rule_update
HALVES = (slice(0, 37), slice(37, 40))


def tokens_given(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[DeltaInputs]:
    """Return what the operation was given during a call."""
    seen: list[DeltaInputs] = []
    with monkeypatch.context() as patch:
        patch.setattr(sequences, "run_gated_delta", lambda inputs, *_: seen.append(inputs))
        call()
    return seen


@pytest.mark.parametrize("packed", [True, False], ids=["columns", "apart"])
def test_tokens_are_used_where_they_lie(path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one tensor, and contiguous tensors; gates too."""
    lengths = {"ragged": [3, 2], "dense": [3] * 2, "next": [1] * 2, "one": [1]}
    for case in (Case(lengths[name], packed=packed, dense=name != "ragged") for name in lengths):
        chunk, n = good_chunk(path, case), len(case.lengths)
        row = good_rows(path, replace(case, slots=list(range(n))))
        update = good_update(path, replace(case, slots=list(range(n))))
        for function, told in ((CHUNK, chunk), (ROW, row), (UPDATE, update)):
            (inputs,) = tokens_given(partial(function, **told), monkeypatch)
            for name, x in zip(["q", "k", "v", "a", "b"], [*inputs.tokens, inputs.a, inputs.b], strict=True):
                given = told[{"a": "g", "b": "beta"}.get(name, name) if function is not UPDATE else name]
                assert x.data_ptr() == given.data_ptr() and torch.equal(x, given.flatten(2).flatten(0, 1))


def test_tokens_that_lie_otherwise_are_copied_alone(exact_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = good_chunk(exact_path, Case([4] * 2, dense=True, packed=False, heads=(2, 4, 16, 8)))
    k, v = told["k"], told["v"]
    odd = {
        "heads-apart": (1, torch.stack((k, k), dim=3)[:, :, :, 0]),
        "values-apart": (1, k.transpose(2, 3).contiguous().transpose(2, 3)),
        "sequences-apart": (2, torch.cat((v, v), dim=1)[:, :4]),
        "one-token-again": (2, v[:, :1].expand(v.shape)),
        "tokens-overlap": (1, k.flatten().as_strided(k.shape, (64, 16, 16, 1))),
    }
    for which, x in odd.values():
        other = told | {"qkv"[which]: x}
        (inputs,) = tokens_given(partial(CHUNK, **other), monkeypatch)
        for i, (given, got) in enumerate(zip((other["q"], other["k"], other["v"]), inputs.tokens, strict=True)):
            assert (got.data_ptr() == given.data_ptr()) == (i != which)
            assert torch.equal(got, given.flatten(2).flatten(0, 1)) and got.stride(1) == 1


@pytest.mark.parametrize("wide", ["qk", "q", "v"])
def test_tokens_of_several_dtypes_are_computed_in_fp32(path: Path, wide: str) -> None:
    case = Case([4, 37], [3, 1], heads=(1, 2, 16, 8))
    dtypes = {name: torch.float32 if name in wide else path.narrow for name in "qkv"}
    call = make_call(case, replace(path, dtype=torch.float32))
    told = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    told |= {name: told[name].to(dtype) for name, dtype in dtypes.items()}
    rounded = {name: told[name][0].cpu().float() for name in "qkv"}
    before = make_states(case, case.slots)
    want, after = field_rows(replace(call.tokens, **rounded), case.starts, before[case.slots])
    o, final = CHUNK(**told, initial_state=before[case.slots].to(path.device), output_final_state=True)
    pool = before.to(path.device)
    other, _ = ROW(**told, initial_state=pool, ssm_state_indices=call.indices())
    assert final is not None
    for states in (final, pool[case.slots]):
        assert_close("states", states, after, torch.float32)
    for got in (o, other):
        assert got.dtype == dtypes["v"]
        assert_close("o", got.flatten(0, 1), want, got.dtype)


def test_more_query_heads_share_keys_and_values(path: Path) -> None:
    """FlashInfer's meaning: gates, states and outputs have the heads of q."""
    case = Case([4, 19], [3, 1], heads=(6, 6, 16, 8))
    repeated = torch.tensor([0, 0, 0, 1, 1, 1], device=path.device)
    chunk, row, update = good_chunk(path, case), good_rows(path, case), good_update(path, case)
    for function, told in ((CHUNK, chunk | {"output_final_state": True}), (ROW, row), (UPDATE, update)):
        few = told | {name: told[name][:, :, [2, 4]] for name in "kv"}
        want = told | {name: few[name][:, :, repeated] for name in "kv"}
        pools = [name for name in told if name.startswith("initial_state") and told[name].ndim == 4]
        want |= {name: told[name].clone() for name in pools}
        got, expected = function(**few), function(**want)
        got, expected = ((x,) if isinstance(x, Tensor) else x for x in (got, expected))
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        assert all(torch.equal(few[name], want[name]) for name in pools)


@pytest.mark.parametrize("v_first", [True, False], ids=["v-first", "k-first"])
def test_a_sequence_goes_on_as_fla_calls_it(path: Path, v_first: bool) -> None:
    """A prefill, then its next tokens: states are new ones, in either order of their dimensions."""
    case = Case([40], dense=True, packed=False)
    call, before = make_call(case, path), make_states(case, [0])[:1]
    want, after = field_rows(call.tokens, case.starts, before)
    told = call.arguments(g=call.tokens.g, beta=call.tokens.beta) | {"state_v_first": v_first}
    first, rest = ({n: x[:, part] if isinstance(x, Tensor) else x for n, x in told.items()} for part in HALVES)
    initial = (before if v_first else before.transpose(2, 3).contiguous()).to(path.device)
    kept = initial.clone()
    o, middle = CHUNK(**first, initial_state=initial, output_final_state=True)
    assert middle is not None and middle.shape == initial.shape and torch.equal(initial, kept)
    kept = middle.clone()
    other, final = ROW(**rest, initial_state=middle, output_final_state=True)
    assert final is not None and final.dtype == torch.float32 and torch.equal(middle, kept)
    assert_close("o", torch.cat((o, other), dim=1)[0], want, path.dtype)
    assert_close("final", final if v_first else final.transpose(2, 3), after, path.dtype)
    again, none = ROW(**rest, initial_state=middle, output_final_state=False)
    assert none is None and torch.equal(again, other)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "decays"])
@pytest.mark.parametrize("strengths", ["as-they-come", "sigmoid", "twice"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
def test_gates_may_come_as_a_projection_leaves_them(path: Path, gated: bool, strengths: str, has_bias: bool) -> None:
    case = Case([40], dense=True, packed=False)
    call = make_call(case, path)
    raw, logits = torch.randn(2, *call.tokens.g.shape, generator=torch.Generator().manual_seed(5)).to(path.device)
    A_log, dt_bias = (torch.randn(raw.shape[-1], generator=torch.Generator().manual_seed(i)) for i in (6, 7))
    decays = -A_log.double().exp() * torch.nn.functional.softplus(raw.cpu().double() + dt_bias * has_bias)
    beta = logits.cpu().double().sigmoid() * (2 if strengths == "twice" else 1)
    flags: dict[str, Any] = {}
    if gated:
        flags = {"use_gate_in_kernel": True, "A_log": A_log.to(path.device)}
        flags |= {"dt_bias": dt_bias.to(path.device)} if has_bias else {}
    if strengths != "as-they-come":
        flags |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": strengths == "twice"}
    exact = replace(call.tokens, g=decays.float(), beta=beta.float())
    want, after = field_rows(exact, case.starts, torch.zeros_like(make_states(case, [0])[:1]))
    told = call.arguments(
        g=raw if gated else decays.float().to(path.device),
        beta=beta.float().to(path.device) if strengths == "as-they-come" else logits,
    )
    for function in (CHUNK, ROW):
        o, final = function(**told | flags, output_final_state=True, state_v_first=False)
        assert_close("o", o[0], want, path.dtype)
        assert_close("final", final.transpose(2, 3), after, path.dtype)


DOUBLES = {"gated": (ROW, (2,)), "kda": (fused_recurrent_kda, (2, 16))}


@pytest.mark.parametrize("name", DOUBLES)
@pytest.mark.parametrize("gated", [False, True], ids=["decays", "gate"])
def test_fp64_is_taken_and_computed_in_fp32(path: Path, name: str, gated: bool) -> None:
    """As fla's own tests call it for a truth to compare with: o as v, the final state fp32."""
    function, decays = DOUBLES[name]
    call = make_call(Case([40], dense=True, packed=False), path)
    told = call.arguments(g=-torch.rand(40, *decays, generator=torch.Generator().manual_seed(3)), beta=call.tokens.beta)
    told |= {"initial_state": make_states(call.case, [0])[:1].transpose(2, 3).contiguous().to(path.device)}
    told |= {"output_final_state": True, "state_v_first": False}
    if gated:
        rates, biases = torch.full((2,), -1.0), torch.full((math.prod(decays),), 0.5)
        told |= {"use_gate_in_kernel": True, "A_log": rates.to(path.device), "dt_bias": biases.to(path.device)}
    fp64 = {key: x.double() if isinstance(x, Tensor) else x for key, x in told.items()}
    single = {key: x.float() if isinstance(x, Tensor) else x for key, x in told.items()}
    (o, final), (want, after) = function(**fp64), function(**single)
    assert o.dtype == torch.float64 and final.dtype == torch.float32
    assert torch.equal(o, want.double()) and torch.equal(final, after)


def test_fp64_states_that_would_be_written_are_refused() -> None:
    told = good_rows(Path("cpu", torch.float32), Case([3, 1], [4, 1]))
    with pytest.raises(TypeError, match=r"^initial_state: expected torch.float32 or .*, got torch.float64"):
        ROW(**(told | {"initial_state": told["initial_state"].double()}))


@pytest.mark.parametrize("told", [{}, {"g": None}], ids=["left-out", "none"])
def test_without_g_nothing_decays(path: Path, told: dict[str, None]) -> None:
    """fla's default."""
    case = Case([3, 20], heads=(2, 4, 16, 8))
    call, before = make_call(case, path), make_states(case, range(2))[:2]
    tokens = replace(call.tokens, g=torch.zeros_like(call.tokens.g))
    want, after = field_rows(tokens, case.starts, before)
    given = call.arguments(beta=tokens.beta) | told
    o, final = ROW(**given, initial_state=before.to(path.device), output_final_state=True)
    assert_close("o", o[0], want, path.dtype)
    assert_close("final", final, after, torch.float32)
    with pytest.raises(TypeError, match=r"^g: expected a tensor, as use_gate_in_kernel is True, got NoneType"):
        ROW(**given, use_gate_in_kernel=True, A_log=torch.zeros(4))


@pytest.mark.parametrize("ndim", [3, 4])
def test_outputs_may_go_to_a_buffer(path: Path, ndim: int) -> None:
    """As vLLM has it."""
    told = good_chunk(path, Case([3, 66])) | {"output_final_state": True}
    want, after = CHUNK(**told)
    room = torch.full((80, 2, 8), torch.nan, dtype=path.dtype, device=path.device)
    part = room[5:74] if ndim == 3 else room[None, 5:74]
    o, final = CHUNK(**told, core_attn_out=part)
    assert o.data_ptr() == part.data_ptr() and o.shape == want.shape
    assert torch.equal(o, want) and torch.equal(final, after)
    assert room[:5].isnan().all() and room[74:].isnan().all()


def test_what_is_no_buffer_for_the_outputs_is_refused() -> None:
    told = good_chunk(Path("cpu", torch.float32), Case([3, 1]))
    for message, room in (
        ("expected a tensor, got list", [1.0]),
        ("expected shape .tokens=4, HV=2, V=8., got", torch.zeros(5, 2, 8)),
        ("expected shape .batch=1, tokens=4, HV=2, V=8., got", torch.zeros(4, 1, 2, 8)),
        ("expected torch.float32, got torch.float16", torch.zeros(4, 2, 8).half()),
        ("expected a contiguous tensor", torch.zeros(4, 8, 2).transpose(1, 2)),
    ):
        with pytest.raises((TypeError, ValueError), match="^core_attn_out: " + message):
            CHUNK(**told, core_attn_out=room)


@pytest.mark.parametrize("function", [CHUNK, ROW, chunk_kda, fused_recurrent_kda], ids=lambda f: f.__name__)
def test_parameters_of_a_gate_that_is_not_computed_are_refused(function: Any) -> None:
    """Unless the flag says that it is not, as fla's tests do."""
    told = good_chunk(Path("cpu", torch.float32), Case([3, 1]))
    del told["initial_state"]
    parameters: dict[str, Any] = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    if function not in (CHUNK, ROW):
        told["g"] = told["g"][..., None].expand(1, 4, 2, 16)
        parameters |= {"dt_bias": torch.zeros(32), "lower_bound": -5.0}
    want, _ = function(**told)
    got, _ = function(**told, **parameters, use_gate_in_kernel=False)
    assert torch.equal(got, want)
    for name, value in parameters.items():
        with pytest.raises(ValueError, match=f"^{name}: expected None, as use_gate_in_kernel is not given, got"):
            function(**told, **{name: value})
        if name != "lower_bound":
            for flag in ({}, {"use_gate_in_kernel": False}, {"use_gate_in_kernel": True}):
                with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got 0.5"):
                    function(**told, **(parameters | {name: 0.5}), **flag)


def test_a_scale_in_the_place_of_the_rates_is_refused() -> None:
    """vLLM and SGLang have it there."""
    told = good_chunk(Path("cpu", torch.float32), Case([3, 1]))
    given: list[Any] = [told["q"], told["k"], told["v"], told["g"][..., None].expand(1, 4, 2, 16), told["beta"], 0.5]
    with pytest.raises(TypeError, match=r"^A_log: expected a tensor, got 0.5"):
        fused_recurrent_kda(*given)


def test_a_bound_is_handed_on_beside_a_pool_also_where_the_decays_are_there() -> None:
    """As SGLang has it: A_log alone says that they are to be computed."""
    told = kda_call(Path("cpu", torch.float32), initial_state_indices=torch.tensor([1, 0]))
    pools = [torch.zeros(2, 2, 8, 16) for _ in range(2)]
    bounds = (None, -5.0)
    outputs = [chunk_kda(**told, initial_state=at, lower_bound=one) for at, one in zip(pools, bounds, strict=True)]
    assert torch.equal(*outputs) and torch.equal(*pools) and pools[0].any()


@pytest.mark.parametrize("function", [CHUNK, ROW, chunk_kda, fused_recurrent_kda], ids=lambda f: f.__name__)
def test_none_is_no_room_for_outputs(function: Any) -> None:
    told = good_chunk(Path("cpu", torch.float32), Case([3, 1]))
    del told["initial_state"]
    if function not in (CHUNK, ROW):
        told["g"] = told["g"][..., None].expand(1, 4, 2, 16)
    assert torch.equal(function(**told, core_attn_out=None)[0], function(**told)[0])
