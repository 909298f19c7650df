"""The delta rules over pools of states as engines call them: prefill, next tokens with their gates, packed tokens.

Whatever must not be read is NaN, and must be NaN afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.compat.test_compat_kda import plain_gates
from rigs.kernels.delta_calls import Case, make_call, make_states
from rigs.kernels.draws import ints, normal
from rigs.kernels.field_gated_delta import Tokens, field_gates
from rigs.kernels.field_recurrence import field_rows, field_slots, field_table
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_kda_packed_decode,
    fused_sigmoid_gating_delta_rule_update,
)

CHUNK: Any = chunk_gated_delta_rule
UPDATE: Any = fused_sigmoid_gating_delta_rule_update
PREFILLS = {
    "ragged": Case([3, 130, 0, 64, 1], [4, 1, 6, 0, 8]),
    "batch": Case([70] * 2, [4, 1], dense=True, index=torch.int64),
    "padding": Case([66, 5, 2], [-1, 8, -1], more=2),
    "only-padding": Case([1, 66], [-1, -7]),
    "no-rows": Case([], []),
    "grouped-heads": Case([9, 66], [3, 8], heads=(2, 4, 24, 12)),
    "states-of-bf16": Case([65, 4], [4, 2], states=torch.bfloat16),
}
STEPS = {
    "decode": Case([1] * 4, [4, 0, -1, 2], dense=True),
    "decode-of-offsets": Case([1] * 3, [4, 0, 7]),
    "several-tokens": Case([2, 0, 3], [4, 1, 0], states=torch.bfloat16),
    "verify": Case([3] * 2, [[4, 1, 7], [2, 5, 0]], [3, 2]),
    "table-of-a-batch": Case([2] * 2, [[4, 1], [2, 5]], dense=True),
    "another-softplus": Case([2, 1], [[4, 6], [1, 2]], [1, 2], softplus=(2.0, 1.5)),
}
BATCHES = {
    "decode": Case([1] * 4, [4, 0, 7, 2], dense=True),
    "padding": Case([1] * 4, [-1, 8, -1, 0], dense=True, states=torch.bfloat16),
    "grouped-heads": Case([1] * 3, [4, 0, 7], dense=True, heads=(2, 4, 24, 12), index=torch.int64, l2norm=False),
    "one-row": Case([1], [3], dense=True, scale=0.3),
    "no-rows": Case([], [], dense=False),
}


def pool_of(case: Case, slots: Any, path: Path) -> tuple[Tensor, Tensor]:
    """Return states of those slots for the reference, and on the device."""
    states = make_states(case, [slot for slot in slots if slot >= 0])
    return states, states.clone().to(path.device)


def states_before(tokens: Tokens, case: Case, pool: Tensor) -> Tensor:
    """Return the state of each row before each 64 of its tokens, `[chunks, HV, V, K]`; zero where a row is skipped."""
    found = [torch.zeros(0, *pool.shape[1:])]
    for i, slot in enumerate(case.slots):
        for done in range(0, case.lengths[i], 64):
            begin = case.starts[i]
            state = pool[[slot]].double() if slot >= 0 else torch.zeros(1, *pool.shape[1:])
            found.append(field_rows(tokens, [begin, begin + done], state)[1] if slot >= 0 else state)
    return torch.cat(found)


@pytest.mark.parametrize("inplace", [True, False], ids=["in-place", "kept"])
@pytest.mark.parametrize("name", PREFILLS)
def test_chunks_of_a_pool_match_the_reference(path: Path, name: str, inplace: bool) -> None:
    """As SGLang calls it."""
    case = PREFILLS[name]
    call = make_call(case, path)
    want, pool = pool_of(case, case.slots, path)
    before = states_before(call.tokens, case, want)
    o = field_slots(call.tokens, case.starts, after := want.clone(), case.slots)
    told = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    told |= {} if inplace else {"inplace_update": False}
    got, none, states = CHUNK(**told, initial_state=pool, initial_state_indices=call.indices(), head_first=False)
    assert none is None and got.dtype == path.dtype and states.dtype == path.dtype
    assert_close("o", got.flatten(0, 1), o, path.dtype)
    assert_close("pool", pool, after if inplace else want, path.dtype if inplace else pool.dtype)
    assert_close("states", states.flatten(0, 1), before, path.dtype)


@pytest.mark.parametrize("gate", ["decays", "softplus", "bounded"])
@pytest.mark.parametrize("name", PREFILLS)
def test_chunks_of_kda_over_a_pool_match_the_reference(path: Path, name: str, gate: str) -> None:
    """As SGLang calls it: A_log says that gates are computed in the kernel."""
    case = PREFILLS[name]
    call, (_, HV, K, _) = make_call(case, path), case.heads
    num_tokens, bound = case.starts[-1], -5.0 if gate == "bounded" else None
    raw, logits = 3 * normal(num_tokens, HV, K, seed=6).to(path.dtype), normal(num_tokens, HV, seed=7).to(path.dtype)
    rates, biases = normal(HV, seed=8), normal(HV * K, seed=9)
    g, beta = plain_gates(raw, rates, biases, logits, bound)
    if gate == "decays":
        told = call.arguments(g=g.float(), beta=beta.float())
    else:
        told = call.arguments(g=raw, beta=logits) | {"beta_is_raw": True, "lower_bound": bound}
        told |= {"A_log": rates.view(1, 1, HV, 1).to(path.device), "dt_bias": biases.to(path.device)}
    tokens = replace(call.tokens, g=g, beta=beta)
    want, pool = pool_of(case, case.slots, path)
    before, kept = states_before(tokens, case, want), pool.clone()
    o = field_slots(tokens, case.starts, want, case.slots)
    told |= {"initial_state_indices": call.indices(), "track_state": None, "chunk_offsets": None}
    got = chunk_kda(**told, initial_state=pool)
    assert isinstance(got, Tensor) and got.dtype == path.dtype
    assert_close("o", got.flatten(0, 1), o, path.dtype)
    assert_close("pool", pool, want, path.dtype)
    again, states = chunk_kda(**told, initial_state=kept, output_intermediate_states=True)
    assert_close("o", again, got, path.dtype)
    assert_close("pool", kept, pool, path.dtype)
    assert_close("states", states.flatten(0, 1), before, path.dtype)


@pytest.mark.parametrize("name", STEPS)
def test_sigmoid_update_as_vllm_calls_it_matches_the_reference(path: Path, name: str) -> None:
    case = STEPS[name]
    call, HV = make_call(case, path), case.heads[1]
    rates, biases = normal(HV, seed=3), normal(HV, seed=4).to(path.dtype)
    a, b = (3 * normal(2, case.starts[-1], HV, seed=5)).to(path.dtype)
    g, beta = field_gates(rates, a, biases, b, *case.softplus)
    tokens = replace(call.tokens, g=g, beta=beta)
    is_table = isinstance(case.slots[0], list)
    want, pool = pool_of(case, range(9) if is_table else case.slots, path)
    if is_table:
        o = field_table(tokens, case.starts, want, case.slots, case.accepted)
    else:
        o = field_slots(tokens, case.starts, want, case.slots)
    told = call.arguments(a=a, b=b) | {"A_log": rates.to(path.device), "dt_bias": biases.to(path.device)}
    told |= {name: told[name].flatten(0, 1) for name in "ab"}
    if case.softplus != (1.0, 20.0):
        told |= {"beta": case.softplus[0], "threshold": case.softplus[1]}
    told |= {"num_accepted_tokens": call.counts(), "ssm_state_indices": call.indices(), "inplace_final_state": True}
    got, final = UPDATE(**told, initial_state=pool)
    assert final is pool and got.dtype == path.dtype
    assert_close("o", got.flatten(0, 1), o, path.dtype)
    assert_close("pool", pool, want, pool.dtype)


@pytest.mark.parametrize("gate", ["gated", "kda", "bounded"])
@pytest.mark.parametrize("name", BATCHES)
def test_packed_tokens_match_the_reference(path: Path, name: str, gate: str) -> None:
    case = BATCHES[name]
    call, (H, HV, K, V) = make_call(case, path), case.heads
    n, bound = len(case.lengths), -5.0 if gate == "bounded" else None
    decays = HV if gate == "gated" else HV * K
    a, b = (3 * normal(n, decays, seed=6)).to(path.dtype), normal(n, HV, seed=7).to(path.dtype)
    rates, biases = normal(HV, seed=8), normal(decays, seed=9)
    if gate == "gated":
        g, beta = field_gates(rates, a, biases, b, 1.0, 20.0)
    else:
        g, beta = plain_gates(a.view(n, HV, K), rates, biases, b, bound)
    want, pool = pool_of(case, case.slots, path)
    o = field_slots(replace(call.tokens, g=g, beta=beta), case.starts, want, case.slots)
    given = (call.wide[:, : 2 * H * K + HV * V], a, b, rates, biases)  # of a wider projection
    scale = K**-0.5 if case.scale is None else case.scale
    out = torch.full((n, 1, HV, V), torch.nan, dtype=path.dtype, device=path.device)
    told: dict[str, Any] = {"lower_bound": bound} if gate != "gated" else {}
    run: Any = fused_recurrent_gated_delta_rule_packed_decode if gate == "gated" else fused_recurrent_kda_packed_decode
    made = run(*(x.to(path.device) for x in given), scale, pool, out, call.indices(), case.l2norm, **told)
    assert made[0] is out and made[1] is pool
    assert_close("out", out[:, 0], o, path.dtype)
    assert_close("pool", pool, want, pool.dtype)


def test_the_wrong_argument_of_a_pool_is_named() -> None:
    case = Case([3, 1], [4, 1])
    path = Path("cpu", torch.float32)
    call = make_call(case, path)
    told = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    told |= {"initial_state": make_states(case, range(9)), "initial_state_indices": call.indices()}
    keyed = told | {"g": -normal(1, 4, 2, 16).abs()}
    kept = told["initial_state"].clone()
    rows: Any = {"initial_state_indices": ints(4, 4)}
    for run, good, message, change in (
        (CHUNK, told, "initial_state: expected a tensor, got NoneType", {"initial_state": None}),
        (CHUNK, told, "initial_state: expected shape .lines, HV=2, V=8, K=16.", {"initial_state": normal(9, 2, 16, 8)}),
        (CHUNK, told, "initial_state_indices: expected shape .rows.", {"initial_state_indices": ints(4, 1)[None]}),
        (CHUNK, told, "initial_state_indices: expected at least 2 rows, got 1", {"initial_state_indices": ints(4)}),
        (CHUNK, told, "initial_state_indices: expected slots below 9, got 9", {"initial_state_indices": ints(4, 9)}),
        (CHUNK, told, "initial_state_indices: expected no slot that two rows", rows),
        (CHUNK, told, "output_final_state: expected False, as initial_state_ind", {"output_final_state": True}),
        (CHUNK, told, "state_v_first: expected True, as initial_state_indices", {"state_v_first": False}),
        (CHUNK, told, "inplace_update: expected True or False, got 1", {"inplace_update": 1}),
        (
            CHUNK,
            told,
            "inplace_update: expected None, as initial_st",
            {"initial_state_indices": None, "inplace_update": True},
        ),
        (chunk_kda, keyed, "output_final_state: expected False, as initial_state_ind", {"output_final_state": True}),
        (
            chunk_kda,
            keyed,
            "return_intermediate_states: expected False, as initial",
            {"return_intermediate_states": True},
        ),
        (chunk_kda, keyed, "initial_state_indices: expected no slot that two rows", rows),
        (chunk_kda, keyed, "track_state: expected None, the only", {"track_state": normal(2)}),
        (chunk_kda, keyed, "dt_bias: expected None, as use_gate_in_kernel is not given", {"dt_bias": normal(32)}),
    ):
        with pytest.raises((TypeError, ValueError), match="^" + message):
            run(**(good | change))
        assert torch.equal(told["initial_state"], kept)
    del keyed["initial_state_indices"], keyed["initial_state"]
    with pytest.raises(
        ValueError, match=r"^output_intermediate_states: expected False, as initial_state_indices is not"
    ):
        chunk_kda(**keyed, output_intermediate_states=True)
    # Several rows may begin with one state that is not written.
    CHUNK(**(told | rows), inplace_update=False)
    assert torch.equal(told["initial_state"], kept)


def test_the_wrong_argument_of_an_update_as_vllm_calls_it_is_named() -> None:
    case = Case([3, 1], [4, 1])
    call = make_call(case, Path("cpu", torch.float32))
    a, b = normal(2, 4, 2)
    told = call.arguments(a=a, b=b) | {"A_log": normal(2), "dt_bias": normal(2)}
    told |= {"initial_state": make_states(case, range(9)), "ssm_state_indices": call.indices()}
    for message, change in (
        ("initial_state_source: expected None, as initial_state is given", {"initial_state_source": normal(9)}),
        ("initial_state_indices: expected None, as initial_state is given", {"initial_state_indices": ints(4, 1)}),
        ("ssm_state_indices: expected a tensor, got NoneType", {"ssm_state_indices": None}),
        ("ssm_state_indices: expected slots below 9, got 9", {"ssm_state_indices": ints(4, 9)}),
        ("inplace_final_state: expected True, the only", {"inplace_final_state": False}),
        ("disable_state_update: expected False, as initial_state is given", {"disable_state_update": True}),
        ("num_accepted_tokens: expected None, as ssm_state_indices is no table", {"num_accepted_tokens": ints(1, 1)}),
        ("beta: expected a finite number above 0", {"beta": 0.0}),
        ("threshold: expected a number", {"threshold": "20"}),
        ("ssm_state_indices: expected None, as initial_state is not", {"initial_state": None}),
        ("v: expected a tensor, got NoneType", {"v": None}),
        ("q: expected a tensor, got NoneType", {"q": None}),
    ):
        with pytest.raises((TypeError, ValueError), match="^" + message):
            UPDATE(**(told | change))


def test_the_wrong_argument_of_packed_tokens_is_named() -> None:
    H, HV, K, V = 1, 2, 16, 8
    told: dict[str, Any] = {"mixed_qkv": normal(3, 2 * H * K + HV * V), "a": normal(3, HV), "b": normal(3, HV)}
    told |= {"A_log": normal(HV), "dt_bias": normal(HV), "scale": 0.25, "initial_state": normal(9, HV, V, K)}
    told |= {"out": torch.zeros(3, 1, HV, V), "ssm_state_indices": ints(4, -1, 1)}
    run: Any = fused_recurrent_gated_delta_rule_packed_decode
    run(**told)
    for message, change in (
        ("mixed_qkv: expected a tensor, got NoneType", {"mixed_qkv": None}),
        ("mixed_qkv: expected shape .batch, channels.", {"mixed_qkv": normal(3, 1, 48)}),
        ("mixed_qkv: expected 2 . H . 16 . 2 . 8 channels, H a divisor of 2, got 47", {"mixed_qkv": normal(3, 47)}),
        ("mixed_qkv: expected 2 . H . 16 . 2 . 8 channels, H a divisor of 2, got 16", {"mixed_qkv": normal(3, 16)}),
        ("mixed_qkv: expected 2 . H . 16 . 2 . 8 channels, H a divisor of 2, got 112", {"mixed_qkv": normal(3, 112)}),
        ("initial_state: expected shape .slots, HV, V, K.", {"initial_state": normal(9, 2, 128)}),
        ("initial_state: expected states that are packed", {"initial_state": normal(9, 2, 16, 8).transpose(2, 3)}),
        ("a: expected shape .batch . tokens=3, HV=2.", {"a": normal(3, 3)}),
        ("out: expected shape .batch=3, tokens=1, HV=2, V=8.", {"out": torch.zeros(3, 2, 8)}),
        ("out: expected torch.float32, got torch.float16", {"out": torch.zeros(3, 1, 2, 8).half()}),
        ("out: expected a contiguous tensor", {"out": torch.zeros(3, 1, 8, 2).transpose(2, 3)}),
        ("ssm_state_indices: expected shape .rows.", {"ssm_state_indices": ints(4, 2, 1)[None]}),
        ("ssm_state_indices: expected at least 3 rows, got 2", {"ssm_state_indices": ints(4, 1)}),
        ("scale: expected a finite number above 0", {"scale": 0.0}),
    ):
        with pytest.raises((TypeError, ValueError), match="^" + message):
            run(**(told | change))
