"""The engines' gated delta rule against a plain one. Whatever must not be read is NaN, and must be NaN afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.delta_calls import NUM_SLOTS, Call, Case, good_chunk, good_rows, good_update, make_call, make_states
from rigs.kernels.draws import ints, normal
from rigs.kernels.field_gated_delta import field_gates
from rigs.kernels.field_recurrence import field_rows, field_slots, field_table
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_sigmoid_gating_delta_rule_update,
)

CHUNKS = {
    "ragged": Case([3, 70, 1]),
    "fresh": Case([5, 66], fresh=True),
    "empty": Case([0, 3, 0, 0, 2, 0]),
    "empty-and-fresh": Case([0, 3, 0], fresh=True),
    "only-empty": Case([0, 0]),
    "no-rows": Case([]),
    "dense": Case([5] * 3, dense=True),
    "dense-apart": Case([2] * 2, dense=True, packed=False),
    "grouped-heads-of-odd-sizes": Case([9, 34], heads=(2, 6, 24, 35)),
    "no-norm-and-a-scale": Case([4, 37], l2norm=False, scale=0.7, packed=False),
    "tiles-apart": Case([70, 3, 130], packed=False, heads=(1, 2, 64, 128)),
    "gates-of-16-bits": Case([4, 17], gates=torch.bfloat16),
    "states-of-bf16": Case([4, 17], states=torch.bfloat16),
    "states-of-fp16": Case([4, 17], states=torch.float16),
}

ROWS = {
    "decode": Case([1] * 3, dense=True),
    "decode-of-offsets": Case([1] * 3),
    "ragged": Case([2, 0, 1, 5]),
    "fresh": Case([2, 0, 1], fresh=True),
    "no-rows": Case([]),
    "apart-and-plain": Case([3, 1], packed=False, l2norm=False, scale=0.3),
    "states-of-bf16": Case([4, 1], states=torch.bfloat16),
}

POOLS = {
    "decode": Case([1] * 4, [4, 0, 7, 2], dense=True),
    "decode-of-offsets": Case([1] * 4, [4, 0, 7, 2]),
    "ragged": Case([2, 0, 1, 5], [4, 1, 0, 2], index=torch.int64),
    "several-tokens": Case([3] * 2, [4, 1], dense=True, packed=False),
    "several-tokens-at-once": Case([5] * 2, [4, 1], dense=True, packed=False, heads=(1, 2, 64, 24)),
    # SGLang #23353: -1 wrapped around to the last slot.
    "padding": Case([1, 2, 1, 0, 3], [-1, 8, -1, -1, 0]),
    "only-padding": Case([1, 2], [-1, -7]),
    "more-slots-than-rows": Case([1, 2], [4, 8], more=3),
    "no-rows": Case([], []),
    "grouped-heads": Case([2, 1], [3, 8], heads=(2, 4, 24, 12), gates=torch.bfloat16),
    "states-of-bf16": Case([3, 1], [4, 2], states=torch.bfloat16),
    "states-of-fp16": Case([3, 1], [4, 2], states=torch.float16),
    "plain-with-a-scale": Case([3, 1], [4, 2], l2norm=False, scale=2.0),
}

TABLES = {
    "verify": Case([3] * 3, [[4, 1, 7], [2, 5, 0], [8, 3, 6]], [1, 2, 3], dense=True),
    "verify-of-offsets": Case([3] * 2, [[4, 1, 7], [2, 5, 0]], [3, 2], more=2),
    "ragged": Case([2, 0, 1, 3], [[4, 1, 7], [2, 5, 5], [8, 3, 8], [6, 0, 2]], [3, 1, 1, 2]),
    "no-counts": Case([2, 1], [[4, 1], [2, 5]]),
    "wider-than-the-rows": Case([2] * 2, [[4, 1, 7, 0], [2, 5, 3, 6]], [4, 1], dense=True, index=torch.int64),
    "padding": Case([2, 2, 2], [[-1, -1], [4, 1], [-1, 3]], [1, 2, 1]),
    "padding-behind-the-tokens": Case([1, 2], [[4, -1], [2, 3]], [1, 2]),
    "padding-for-a-token": Case([2] * 3, [[4, -1], [2, 3], [-1, 5]], [1, 2, 2], dense=True),
    "one-column": Case([1] * 2, [[4], [2]], [1, 1]),
    # vLLM #50021: accepted - 1 was not bounded, and read the row before or what lies before the table.
    "counts-out-of-range": Case([2] * 3, [[4, 1, 7], [2, 5, 3], [8, 6, 0]], [-3, 0, 2**31 - 1], dense=True),
    # vLLM #37035: more than four drafts were read beyond what there is.
    "eight-drafts": Case([8], [list(range(8))], [6], dense=True),
    "no-rows": Case([], torch.zeros(0, 2).tolist()),
    "states-of-bf16": Case([3, 2], [[4, 1, 7], [2, 5, 0]], [1, 3], states=torch.bfloat16),
    "states-of-fp16": Case([3, 2], [[4, 1, 7], [2, 5, 0]], [1, 3], states=torch.float16),
}

GATED = {
    "decode": Case([1] * 4, [4, 0, -1, 2]),
    "decode-of-a-batch": Case([1] * 2, [4, 0], dense=True, packed=False),
    "ragged": Case([2, 0, 1, 5], [4, 1, 0, 2], gates=torch.float32, more=1),
    "another-softplus": Case([2, 1], [4, 1], softplus=(2.0, 1.5)),
    "another-threshold": Case([2, 1], [4, 1], softplus=(1.0, 0.25), states=torch.bfloat16),
    "plain-with-a-scale": Case([3, 1], [4, 2], l2norm=False, scale=0.5, heads=(2, 4, 24, 12)),
}


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.cpu().nan_to_num(7.0), want.cpu().nan_to_num(7.0))


def assert_output(got: Tensor, want: Tensor, call: Call) -> None:
    """Compare an output `[batch, tokens, HV, V]` with the reference's `[T, HV, V]`."""
    assert got.dtype == call.wide.dtype
    assert_close("o", got.flatten(0, 1), want, call.wide.dtype)


def assert_states(got: Tensor, want: Tensor) -> None:
    """Compare states: those that are computed in fp32 as such, whatever the dtype of the tokens."""
    assert_close("states", got, want, got.dtype)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunk_matches_the_reference(path: Path, name: str) -> None:
    case = CHUNKS[name]
    call, n = make_call(case, path), len(case.lengths)
    before = make_states(case, range(n))[:n]
    o, after = field_rows(call.tokens, case.starts, torch.zeros(before.shape) if case.fresh else before)
    arguments = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    initial = None if case.fresh else before.to(path.device)
    kept = {key: x.clone() for key, x in arguments.items() if isinstance(x, Tensor)}
    got, final = chunk_gated_delta_rule(**arguments, initial_state=initial, output_final_state=True)
    assert_output(got, o, call)
    assert final is not None and final.dtype == torch.float32
    assert_close("final_state", final, after, path.dtype)
    again, none = chunk_gated_delta_rule(**arguments, initial_state=initial)
    assert none is None and same_bits(again, got)
    assert initial is None or same_bits(initial, before)
    assert all(same_bits(arguments[key], x) for key, x in kept.items())


@pytest.mark.parametrize("name", ROWS)
def test_recurrent_matches_the_reference(path: Path, name: str) -> None:
    case = ROWS[name]
    call, n = make_call(case, path), len(case.lengths)
    before = make_states(case, range(n))[:n]
    o, after = field_rows(call.tokens, case.starts, torch.zeros(before.shape) if case.fresh else before)
    arguments = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    for inplace in (False, True):
        initial = None if case.fresh else before.to(path.device)
        got, final = fused_recurrent_gated_delta_rule(**arguments, initial_state=initial, inplace_final_state=inplace)
        assert_output(got, o, call)
        assert final is not None and final.dtype == case.states
        assert_states(final, after.to(case.states))
        if initial is not None:
            assert (final is initial) == inplace
            assert inplace or same_bits(initial, before)


@pytest.mark.parametrize("name", POOLS)
def test_recurrent_of_slots_matches_the_reference(path: Path, name: str) -> None:
    case = POOLS[name]
    call = make_call(case, path)
    want = make_states(case, [slot for slot in case.slots if slot >= 0])
    pool = want.to(path.device)
    o = field_slots(call.tokens, case.starts, want := want.clone(), case.slots)
    arguments = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    got, final = fused_recurrent_gated_delta_rule(**arguments, initial_state=pool, ssm_state_indices=call.indices())
    assert final is pool
    assert_output(got, o, call)
    assert_states(pool, want)


@pytest.mark.parametrize("name", TABLES)
def test_recurrent_of_a_table_matches_the_reference(path: Path, name: str) -> None:
    case = TABLES[name]
    call = make_call(case, path)
    counts = case.accepted or [1] * len(case.lengths)
    begins = [row[min(max(count, 1), len(row)) - 1] for row, count in zip(case.slots, counts, strict=True)]
    want = make_states(case, [slot for slot in begins if slot >= 0])
    pool = want.to(path.device)
    o = field_table(call.tokens, case.starts, want := want.clone(), case.slots, case.accepted)
    arguments = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    arguments |= {"ssm_state_indices": call.indices(), "num_accepted_tokens": call.counts()}
    got, final = fused_recurrent_gated_delta_rule(**arguments, initial_state=pool)
    assert final is pool
    assert_output(got, o, call)
    assert_states(pool, want)


@pytest.mark.parametrize("flat", [True, False], ids=["flat-gates", "gates"])
@pytest.mark.parametrize("name", GATED)
def test_sigmoid_update_matches_the_reference(path: Path, name: str, flat: bool) -> None:
    case = GATED[name]
    call = make_call(case, path)
    HV = case.heads[1]
    rates, biases = normal(HV, seed=3), normal(HV, seed=4).to(path.dtype)
    a, b = (3 * normal(2, case.starts[-1], HV, seed=5)).to(path.dtype)
    g, beta = field_gates(rates, a, biases, b, *case.softplus)
    want = make_states(case, [slot for slot in case.slots if slot >= 0])
    pool = want.to(path.device)
    o = field_slots(replace(call.tokens, g=g, beta=beta), case.starts, want := want.clone(), case.slots)
    arguments = call.arguments(a=a, b=b)
    if flat:
        arguments |= {name: arguments[name].flatten(0, 1) for name in "ab"}
    got = fused_sigmoid_gating_delta_rule_update(
        A_log=rates.to(path.device),
        dt_bias=biases.to(path.device),
        softplus_beta=case.softplus[0],
        softplus_threshold=case.softplus[1],
        initial_state_source=pool,
        initial_state_indices=call.indices(),
        **arguments,
    )
    assert_output(got, o, call)
    assert_states(pool, want)


def test_a_strength_of_none_is_one(exact_path: Path) -> None:
    told = good_rows(exact_path, POOLS["ragged"])
    other = told | {"initial_state": told["initial_state"].clone(), "beta": torch.ones_like(told["beta"])}
    got, _ = fused_recurrent_gated_delta_rule(**(told | {"beta": None}))
    want, _ = fused_recurrent_gated_delta_rule(**other)
    assert torch.equal(got, want) and torch.equal(told["initial_state"], other["initial_state"])


def test_strided_gates_and_states_are_as_good(exact_path: Path) -> None:
    told = good_chunk(exact_path, CHUNKS["ragged"])
    want = chunk_gated_delta_rule(**told, output_final_state=True)
    wide = torch.stack((told["g"], told["beta"]), dim=-1)
    turned = told["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    other = told | {"g": wide[..., 0], "beta": wide[..., 1], "initial_state": turned}
    for x, y in zip(chunk_gated_delta_rule(**other, output_final_state=True), want, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_offsets_of_the_sigmoid_update_count_the_tokens_of_a_batch(path: Path) -> None:
    """As SGLang takes them: one sequence behind the other, over the rows of the batch."""
    told = good_update(path, Case([3, 1, 4], [4, 1, 0], packed=False))
    pool = told.pop("initial_state_source")
    other = pool.clone()
    want = UPDATE(**told, initial_state_source=pool)
    batch = {name: told[name].unflatten(1, (2, 4))[0] for name in ("q", "k", "v", "a", "b")}
    got = UPDATE(**(told | batch), initial_state_source=other)
    assert got.shape == (2, 4, 2, 8) and torch.equal(got.flatten(0, 1), want[0]) and torch.equal(other, pool)


@pytest.mark.parametrize("apart", [False, True], ids=["packed", "apart"])
@pytest.mark.parametrize("final", [False, True], ids=["in-place", "named"])
def test_a_pool_of_the_sigmoid_update_is_v_first_whatever_its_shape(path: Path, apart: bool, final: bool) -> None:
    """As SGLang reads it: by memory alone."""
    told = good_update(path, Case([3, 1], [4, 1]))
    pool = told.pop("initial_state_source")
    shaped = pool.clone().view(len(pool), 2, 16, 8)
    if apart:
        room = torch.zeros(len(pool), 2, 2, 16, 8, device=path.device)
        room[:, 1] = shaped
        shaped = room[:, 1]
    named = {"final_state": shaped} if final else {}
    want = UPDATE(**told, initial_state_source=pool)
    assert torch.equal(UPDATE(**told, initial_state_source=shaped, **named), want)
    assert torch.equal(shaped.flatten(1), pool.flatten(1))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-place", "final-state"])
@pytest.mark.parametrize("is_kda", [False, True], ids=["gated", "kda"])
def test_the_sigmoid_update_may_keep_no_state(path: Path, is_kda: bool, elsewhere: bool) -> None:
    """As SGLang verifies drafts. Rows may begin with one and the same state then."""
    told = good_update(path, Case([3, 1, 4], [4, 1, 0]))
    if is_kda:
        a, dt_bias = told["a"][..., None].expand(1, 8, 2, 16), told["dt_bias"].repeat_interleave(16)
        told |= {"a": a.contiguous(), "dt_bias": dt_bias, "is_kda": True}
    pool = told["initial_state_source"]
    pool[1] = pool[4]
    kept = pool.clone()
    want = UPDATE(**(told | {"initial_state_source": pool.clone()}))
    if elsewhere:
        told["final_state"] = torch.full_like(pool, 7.0)
    told["initial_state_indices"] = ints(4, 4, 0).to(path.device)
    assert torch.equal(UPDATE(**told, disable_state_update=True), want) and torch.equal(pool, kept)
    assert not elsewhere or bool((told["final_state"] == 7.0).all())


CHUNK, UPDATE = chunk_gated_delta_rule, fused_sigmoid_gating_delta_rule_update
ROW: Any = fused_recurrent_gated_delta_rule


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_functions_run_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """A replay follows what the index tensors hold by then, and nothing waits for the device."""
    path = Path("cuda", dtype)
    chunk = good_chunk(path, Case([30, 40]))
    row = good_rows(path, Case([2, 1], [4, 1]))
    table = good_rows(path, Case([2, 3], [[4, 1, 7], [2, 5, 0]], [1, 2]))
    update = good_update(path, Case([2, 1], [4, 1], softplus=(2.0, 20.0)))

    def run() -> list[Tensor]:
        o, final = CHUNK(**chunk, output_final_state=True)
        assert final is not None
        return [o, final, *ROW(**row), *ROW(**table), UPDATE(**update), UPDATE(**(update | {"softplus_beta": 2.0}))]

    def change() -> None:
        chunk["cu_seqlens"].copy_(ints(0, 0, 70))
        row["ssm_state_indices"].copy_(ints(-1, 8))
        table["ssm_state_indices"].copy_(torch.tensor([[8, 6, 3], [-1, 5, 0]]))
        table["num_accepted_tokens"].copy_(ints(3, 1))
        table["cu_seqlens"].copy_(ints(0, 1, 5))
        update["initial_state_indices"].copy_(ints(0, -1))

    run()
    with no_waits():
        run()
    check_replay(run, [row["initial_state"], table["initial_state"], update["initial_state_source"]], change)


@pytest.mark.gpu
def test_a_row_too_long_for_its_table_is_skipped() -> None:
    check_row_too_long_for_its_table(Path("cuda", torch.bfloat16))


def check_row_too_long_for_its_table(path: Path) -> None:
    """Where nobody can tell the caller, neither the row's slots nor others' may change."""
    told = good_rows(path, Case([3, 1], [[4, 1, 7], [2, 5, 0]], [1, 2]))
    told["ssm_state_indices"] = told["ssm_state_indices"][:, :2]
    before = told["initial_state"].clone()
    o, pool = ROW(**told)
    assert not o[:, :3].any() and o[:, 3:].any()
    others = [slot for slot in range(NUM_SLOTS) if slot != 2]
    assert torch.equal(pool[others], before[others]) and not torch.equal(pool[2], before[2])
