"""The engines' gated delta rule against a plain one. Whatever must not be read is NaN, and must be NaN afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rigs.kernels.field_gated_delta import Tokens, field_gates, field_pool, field_rows, field_table
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import (
    chunk_gated_delta_rule,
    delta_inputs,
    fused_recurrent_gated_delta_rule,
    fused_sigmoid_gating_delta_rule_update,
)

NUM_SLOTS = 9


@dataclass(frozen=True)
class Case:
    """Rows of a call. `dense`: they are of one length and come as a batch; `packed`: q, k, v are columns of one tensor.

    `slots`: of the rows, or a table; None: row i has state i. `fresh`: there are no states to begin with.
    """

    lengths: Sequence[int]
    slots: Any = None
    accepted: Sequence[int] | None = None
    fresh: bool = False
    dense: bool = False
    packed: bool = True
    l2norm: bool = True
    scale: float | None = None
    heads: tuple[int, int, int, int] = (1, 2, 16, 8)
    gates: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    softplus: tuple[float, float] = (1.0, 20.0)
    more: int = 0

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


@dataclass(frozen=True)
class Call:
    """The tensors of a call on the host, packed; the reference's view of them, and keywords of the function."""

    case: Case
    tokens: Tokens
    wide: Tensor
    device: str

    def arguments(self, **gates: Tensor) -> dict[str, Any]:
        """Return q, k, v, the gates and the keywords that all functions have, on the device."""
        case = self.case
        H, HV, K, V = case.heads
        batch = (len(case.lengths), case.lengths[0]) if case.dense else (1, case.starts[-1])
        wide = self.wide.to(self.device)[:, : 2 * H * K + HV * V]
        parts = wide.split((H * K, H * K, HV * V), dim=1)
        q, k, v = (
            x.unflatten(1, size).unflatten(0, batch) for x, size in zip(parts, [(H, K)] * 2 + [(HV, V)], strict=True)
        )
        if not case.packed:
            q, k, v = q.contiguous(), k.clone(), v.contiguous()
        told = {"q": q, "k": k, "v": v, "scale": case.scale, "use_qk_l2norm_in_kernel": case.l2norm}
        told |= {name: gate.to(self.device).unflatten(0, batch) for name, gate in gates.items()}
        if not case.dense:
            told["cu_seqlens"] = torch.tensor(case.starts, dtype=case.index, device=self.device)
        return told

    def indices(self) -> Tensor:
        """Return the slots, and behind them `more` rows that must not be read."""
        slots = torch.tensor(self.case.slots, dtype=self.case.index)
        return torch.cat((slots, torch.full((self.case.more, *slots.shape[1:]), 10**6).to(slots))).to(self.device)

    def counts(self) -> Tensor | None:
        accepted = self.case.accepted
        return None if accepted is None else torch.tensor([*accepted, *[7] * self.case.more]).to(self.device)


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
    "padding": Case([1, 2, 1, 0, 3], [-1, 4, -1, -1, 0]),
    "only-padding": Case([1, 2], [-1, -7]),
    "more-slots-than-rows": Case([1, 2], [4, 8], more=3),
    "no-rows": Case([], []),
    "grouped-heads": Case([2, 1], [3, 8], heads=(2, 4, 24, 12), gates=torch.bfloat16),
    "states-of-bf16": Case([3, 1], [4, 2], states=torch.bfloat16),
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
    "no-rows": Case([], torch.zeros(0, 2).tolist()),
    "states-of-bf16": Case([3, 2], [[4, 1, 7], [2, 5, 0]], [1, 3], states=torch.bfloat16),
}

GATED = {
    "decode": Case([1] * 4, [4, 0, -1, 2]),
    "decode-of-a-batch": Case([1] * 2, [4, 0], dense=True, packed=False),
    "ragged": Case([2, 0, 1, 5], [4, 1, 0, 2], gates=torch.float32, more=1),
    "another-softplus": Case([2, 1], [4, 1], softplus=(2.0, 1.5)),
    "another-threshold": Case([2, 1], [4, 1], softplus=(1.0, 0.25), states=torch.bfloat16),
    "plain-with-a-scale": Case([3, 1], [4, 2], l2norm=False, scale=0.5, heads=(2, 4, 24, 12)),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_call(case: Case, path: Path) -> Call:
    """Make random tokens for the case; those of skipped rows are NaN."""
    H, HV, K, V = case.heads
    num_tokens, keys = case.starts[-1], H * K
    wide = normal(num_tokens, 2 * keys + HV * V + 3)
    if not case.l2norm:
        # Keys of length 0.7: not those of a norm, and longer than 1 they would make states grow from token to token.
        heads = wide[:, keys : 2 * keys].unflatten(1, (H, K))
        wide[:, keys : 2 * keys] = 0.7 * torch.nn.functional.normalize(heads, dim=-1).flatten(1)
    wide = wide.to(path.dtype)
    for i, slots in enumerate(case.slots or ()):
        if slots == -1 or (isinstance(slots, list) and min(slots) == -1 == max(slots)):
            wide[case.starts[i] : case.starts[i + 1]] = torch.nan
    q, k, v, _ = wide.split((keys, keys, HV * V, 3), dim=1)
    g = -normal(num_tokens, HV, seed=1).abs().to(case.gates)
    beta = (2 * normal(num_tokens, HV, seed=2).sigmoid()).to(case.gates)
    split = (q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)))
    return Call(case, Tokens(*split, g, beta, case.scale, case.l2norm), wide, path.device)


def make_states(case: Case, used: Sequence[int]) -> Tensor:
    """Return states of slots that are NaN but where they are used."""
    _, HV, K, V = case.heads
    states = torch.full((NUM_SLOTS, HV, V, K), torch.nan)
    for slot in used:
        states[slot] = normal(HV, V, K, seed=10 + slot)
    return states.to(case.states)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.cpu().nan_to_num(7.0), want.cpu().nan_to_num(7.0))


def assert_output(got: Tensor, want: Tensor, call: Call, limit: torch.dtype | None = None) -> None:
    """Compare an output `[batch, tokens, HV, V]` with the reference's `[T, HV, V]`, as its dtype allows or `limit`."""
    assert got.dtype == call.wide.dtype
    assert_close("o", got.flatten(0, 1), want, limit or call.wide.dtype)


def assert_states(got: Tensor, want: Tensor) -> None:
    """Compare states: those that are computed in fp32 as such, whatever the dtype of the tokens."""
    assert_close("states", got, want, torch.float32 if got.dtype == torch.float32 else torch.bfloat16)


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
        assert final.dtype == case.states
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
    o = field_pool(call.tokens, case.starts, want := want.clone(), case.slots)
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
    # The token behind a state of 16 bits sees how it was rounded.
    assert_output(got, o, call, torch.bfloat16 if case.states == torch.bfloat16 else None)
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
    o = field_pool(replace(call.tokens, g=g, beta=beta), case.starts, want := want.clone(), case.slots)
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


def good_chunk(path: Path, case: Case = CHUNKS["ragged"]) -> dict[str, Any]:
    call = make_call(case, path)
    states = make_states(case, range(len(case.lengths)))[: len(case.lengths)].to(path.device)
    return call.arguments(g=call.tokens.g, beta=call.tokens.beta) | {"initial_state": states}


def good_rows(path: Path, case: Case) -> dict[str, Any]:
    """Return arguments of `fused_recurrent_gated_delta_rule` with a pool all of whose slots are in use."""
    call = make_call(case, path)
    told = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    told |= {"initial_state": make_states(case, range(NUM_SLOTS)).to(path.device), "ssm_state_indices": call.indices()}
    return told if case.accepted is None else told | {"num_accepted_tokens": call.counts()}


def good_update(path: Path, case: Case) -> dict[str, Any]:
    """Return arguments of `fused_sigmoid_gating_delta_rule_update` with a pool all of whose slots are in use."""
    call, HV = make_call(case, path), case.heads[1]
    a, b = normal(2, case.starts[-1], HV, seed=5).to(path.dtype)
    told = call.arguments(a=a, b=b) | {"A_log": normal(HV).to(path.device), "dt_bias": normal(HV).to(path.device)}
    told |= {"initial_state_source": make_states(case, range(NUM_SLOTS)).to(path.device)}
    return told | {"softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_indices": call.indices()}


def test_columns_of_one_tensor_are_used_where_they_are(path: Path) -> None:
    for case in (Case([3, 2]), Case([3] * 2, dense=True), Case([1] * 2, dense=True), Case([1])):
        call = make_call(case, path)
        apart = make_call(replace(case, packed=False), path).arguments()
        told = call.arguments()
        g = call.tokens.g.to(path.device).view(told["v"].shape[:3])
        gates: dict[str, Tensor | None] = {"g": g, "beta": None}
        shared = delta_inputs.pack_delta(told["q"], told["k"], told["v"], gates, None, normalize=True, optional="beta")
        copied = delta_inputs.pack_delta(
            apart["q"], apart["k"], apart["v"], gates, None, normalize=True, optional="beta"
        )
        assert shared.qkv.data_ptr() == told["q"].data_ptr() and shared.a.data_ptr() == g.data_ptr()
        assert copied.qkv.data_ptr() not in (apart["q"].data_ptr(), apart["k"].data_ptr())
        assert torch.equal(shared.qkv, copied.qkv)


def test_columns_that_only_look_alike_are_copied(exact_path: Path) -> None:
    H, HV, K, V = Case([]).heads
    wide = normal(6, 2 * H * K + HV * V).to(exact_path.device)
    q, k, v = wide.split((H * K, H * K, HV * V), dim=1)
    swapped, late = (k, q, v), (q[:3], k[:3], v[3:])
    for parts in (swapped, late, (q[:3], k[:3], v.clone()[:3]), (q[::2], k[::2], v[:3]), (q[:3], q[:3], v[:3])):
        want = torch.cat(parts, dim=1)
        one, two, three = (x.unflatten(1, size)[None] for x, size in zip(parts, [(H, K), (H, K), (HV, V)], strict=True))
        gates = {"g": torch.zeros(1, len(want), HV, device=exact_path.device), "beta": None}
        assert torch.equal(
            delta_inputs.pack_delta(one, two, three, gates, None, normalize=True, optional="beta").qkv, want
        )
    gates = {"g": torch.zeros(2, 3, HV, device=exact_path.device), "beta": None}
    # A batch whose rows do not follow each other, and tokens that are all the same one.
    for apart in (wide[None].expand(2, -1, -1)[:, :3], wide.unflatten(0, (2, 3))[:, :1].expand(-1, 3, -1)):
        columns = apart.split((H * K, H * K, HV * V), dim=2)
        one, two, three = (x.unflatten(2, size) for x, size in zip(columns, [(H, K), (H, K), (HV, V)], strict=True))
        packed = delta_inputs.pack_delta(one, two, three, gates, None, normalize=True, optional="beta").qkv
        assert torch.equal(packed, apart.flatten(0, 1)) and packed.is_contiguous()


def test_a_strength_of_none_is_one(exact_path: Path) -> None:
    told = good_rows(exact_path, POOLS["ragged"])
    other = told | {"initial_state": told["initial_state"].clone(), "beta": torch.ones_like(told["beta"])}
    got, _ = fused_recurrent_gated_delta_rule(**(told | {"beta": None}))
    want, _ = fused_recurrent_gated_delta_rule(**other)
    assert torch.equal(got, want) and torch.equal(told["initial_state"], other["initial_state"])


def test_strided_gates_and_states_are_as_good(exact_path: Path) -> None:
    told = good_chunk(exact_path)
    want = chunk_gated_delta_rule(**told, output_final_state=True)
    wide = torch.stack((told["g"], told["beta"]), dim=-1)
    turned = told["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    other = told | {"g": wide[..., 0], "beta": wide[..., 1], "initial_state": turned}
    for x, y in zip(chunk_gated_delta_rule(**other, output_final_state=True), want, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


def test_the_decay_may_be_given_or_made(exact_path: Path) -> None:
    told = good_update(exact_path, GATED["ragged"])
    rates, a, biases, b = (told[name].cpu() for name in ("A_log", "a", "dt_bias", "b"))
    g, beta = field_gates(rates, a, biases, b, 1.0, 20.0)
    pool = told["initial_state_source"].clone()
    same = {name: told[name] for name in ("q", "k", "v", "scale", "use_qk_l2norm_in_kernel", "cu_seqlens")}
    same |= {"g": g.float().to(exact_path.device), "beta": beta.float().to(exact_path.device)}
    o, _ = fused_recurrent_gated_delta_rule(
        **same, initial_state=pool, ssm_state_indices=told["initial_state_indices"][: len(GATED["ragged"].lengths)]
    )
    assert_close("o", fused_sigmoid_gating_delta_rule_update(**told), o, torch.float32)
    assert_close("pool", told["initial_state_source"], pool, torch.float32)


def test_gradients_are_neither_needed_nor_recorded(exact_path: Path) -> None:
    told = good_update(exact_path, GATED["decode-of-a-batch"])
    for name in ("A_log", "dt_bias", "q", "v"):
        told[name].requires_grad_()
    assert not fused_sigmoid_gating_delta_rule_update(**told).requires_grad
    assert not told["initial_state_source"].requires_grad
    chunk = good_chunk(exact_path)
    chunk["v"] = chunk["v"].clone().requires_grad_()
    assert not any(x is None or x.requires_grad for x in chunk_gated_delta_rule(**chunk, output_final_state=True))


# What engines were found to get wrong, named after its report where there is one.


@pytest.mark.parametrize("count", [-3, 0, 5, 2**31 - 1])
def test_an_accepted_count_outside_the_table_reads_no_other_row(path: Path, count: int) -> None:
    """vLLM #50021: accepted - 1 is not bounded: 0 reads the end of the row before, or what lies before the table."""
    case = Case([2] * 3, [[4, 1, 7], [2, 5, 3], [8, 6, 0]], [count] * 3, dense=True)
    told = good_rows(path, case)
    nearest = told | {"initial_state": told["initial_state"].clone()}
    nearest["num_accepted_tokens"] = told["num_accepted_tokens"].clamp(1, 3)
    got, pool = fused_recurrent_gated_delta_rule(**told)
    want, same = fused_recurrent_gated_delta_rule(**nearest)
    assert torch.equal(got, want) and torch.equal(pool, same)
    assert got.isfinite().all()


@pytest.mark.parametrize("slots", [[4, -1, -1, -1], [[4], [-1], [-1], [-1]]], ids=["slots", "table"])
def test_padding_never_writes_the_last_slot(path: Path, slots: Any) -> None:
    """SGLang #23353: -1 of a padded graph wraps around to the last slot; vLLM #55178: padding advances states."""
    told = good_rows(path, Case([1] * 4, slots))
    before = told["initial_state"].clone()
    o, pool = fused_recurrent_gated_delta_rule(**told)
    others = [slot for slot in range(NUM_SLOTS) if slot != 4]
    assert torch.equal(pool[others], before[others]) and not torch.equal(pool[4], before[4])
    assert not o[:, 1:].any() and o[:, 0].any()


def test_padding_of_an_update_computes_nothing(path: Path) -> None:
    """SGLang computes rows of -1 from a zero state: their outputs are not zero, and a NaN in them would show."""
    told = good_update(path, GATED["decode"])
    before = told["initial_state_source"].clone()
    told["a"][:, 2] = torch.nan
    o = fused_sigmoid_gating_delta_rule_update(**told)
    assert not o[:, 2].any() and o.isfinite().all()
    assert torch.equal(told["initial_state_source"][-1], before[-1])


def test_slot_0_is_an_ordinary_one(path: Path) -> None:
    """vLLM reserves slot 0 and skips its rows, SGLang writes padding to it: here it is a slot like the others."""
    told = good_rows(path, Case([2, 1], [0, 3]))
    moved = told | {"initial_state": told["initial_state"].roll(1, dims=0)}
    moved["ssm_state_indices"] = told["ssm_state_indices"] + 1
    got, pool = fused_recurrent_gated_delta_rule(**told)
    want, other = fused_recurrent_gated_delta_rule(**moved)
    assert torch.equal(got, want) and torch.equal(pool, other.roll(-1, dims=0)) and got.any()


@pytest.mark.parametrize("slots", [[4, 2, 7, 5], [[4, 1], [2, 0], [7, 3], [5, 6]]], ids=["slots", "table"])
def test_empty_rows_leave_their_slots_alone(path: Path, slots: Any) -> None:
    """vLLM #39273, #40738: a row without drafts after an accepted step; SGLang stores its state again."""
    told = good_rows(path, Case([0, 2, 0, 1], slots, [2] * 4 if isinstance(slots[0], list) else None))
    before = told["initial_state"].clone()
    o, pool = fused_recurrent_gated_delta_rule(**told)
    idle = [4, 7] if isinstance(slots[0], int) else [4, 1, 7, 3, 6]
    assert torch.equal(pool[idle], before[idle])
    written = [2, 5] if isinstance(slots[0], int) else [2, 0, 5]
    assert all(not torch.equal(pool[slot], before[slot]) for slot in written) and o.isfinite().all()


def test_the_final_state_of_an_empty_sequence_is_its_initial_one(path: Path) -> None:
    """In vLLM's Mamba2 an empty sequence in the middle makes the next one begin with another's state."""
    told = good_chunk(path, CHUNKS["empty"])
    o, final = chunk_gated_delta_rule(**told, output_final_state=True)
    _, fresh = chunk_gated_delta_rule(**(told | {"initial_state": None}), output_final_state=True)
    assert final is not None and fresh is not None
    for i, length in enumerate(CHUNKS["empty"].lengths):
        assert torch.equal(final[i], told["initial_state"][i]) == (length == 0)
        assert fresh[i].any() == (length > 0)
    full = good_chunk(path, Case([3, 2]))
    full |= {name: told[name] for name in ("q", "k", "v", "g", "beta")}
    full["initial_state"] = told["initial_state"][[1, 4]]
    assert_close("o", o, chunk_gated_delta_rule(**full)[0], path.dtype)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunk", "recurrent"])
def test_no_initial_state_is_one_of_zeros(path: Path, chunked: bool) -> None:
    """fla #1003: no initial state and one of zeros give other bits."""
    told = good_chunk(path, CHUNKS["ragged"] if chunked else ROWS["ragged"])
    results = []
    for initial in (None, torch.zeros_like(told["initial_state"])):
        told["initial_state"] = initial
        if chunked:
            o, final = chunk_gated_delta_rule(**told, output_final_state=True)
        else:
            o, final = fused_recurrent_gated_delta_rule(**told)
        assert final is not None
        results.append((o, final))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_states_without_slots_are_those_of_rows_not_of_tokens(path: Path) -> None:
    """vLLM 0.33 finds the state of a row at the number of its first token."""
    told = good_chunk(path, Case([3, 1, 2]))
    before = told["initial_state"].clone()
    o, final = fused_recurrent_gated_delta_rule(**told)
    alone = good_chunk(path, Case([2]))
    alone |= {name: told[name][:, 4:] for name in ("q", "k", "v", "g", "beta")} | {"initial_state": before[2:].clone()}
    want, state = fused_recurrent_gated_delta_rule(**alone)
    assert_close("o", o[:, 4:], want, path.dtype)
    assert_close("state", final[2:], state, torch.float32)


def test_the_strength_is_not_rounded(path: Path) -> None:
    """SGLang #38975, vLLM #53877: beta rounded to the dtype of the tokens, so that the state drifts."""
    case = Case([9], [4])
    call = make_call(case, path)
    pool = make_states(case, [4])
    want, rough = pool.clone(), pool.clone()
    field_pool(call.tokens, case.starts, want, case.slots)
    rounded = replace(call.tokens, beta=call.tokens.beta.bfloat16())
    field_pool(rounded, case.starts, rough, case.slots)
    arguments = call.arguments(g=call.tokens.g, beta=call.tokens.beta)
    _, got = fused_recurrent_gated_delta_rule(
        **arguments, initial_state=pool.to(path.device), ssm_state_indices=call.indices()
    )
    assert_states(got, want)
    assert (got.cpu() - rough)[4].abs().amax() > 1e-3


def test_made_strengths_and_decays_are_not_rounded(path: Path) -> None:
    """The same where they are computed from values of the tokens' dtype."""
    case = Case([9], [4])
    call, told = make_call(case, path), good_update(path, case)
    pool = make_states(case, [4])
    rates, a, biases, b = (told[name].cpu() for name in ("A_log", "a", "dt_bias", "b"))
    g, beta = field_gates(rates, a, biases, b, 1.0, 20.0)
    field_pool(replace(call.tokens, g=g[0], beta=beta[0]), case.starts, want := pool.clone(), case.slots)
    told["initial_state_source"] = pool.to(path.device)
    fused_sigmoid_gating_delta_rule_update(**told)
    assert_states(told["initial_state_source"], want)


def test_more_than_four_drafts(path: Path) -> None:
    """vLLM #37035: more than four speculative tokens read beyond what there is."""
    case = Case([8], [list(range(8))], [6], dense=True)
    call = make_call(case, path)
    pool = make_states(case, range(8))
    o = field_table(call.tokens, case.starts, want := pool.clone(), case.slots, case.accepted)
    told = good_rows(path, case) | {"initial_state": pool.to(path.device)}
    got, after = fused_recurrent_gated_delta_rule(**told)
    assert_output(got, o, call)
    assert_states(after, want)


def test_the_next_step_goes_on_behind_any_accepted_draft(exact_path: Path) -> None:
    """Tokens of a step that are not accepted leave nothing behind."""
    for accepted in (1, 2, 3):
        told = good_rows(exact_path, Case([3], [[4, 1, 7]], [1], dense=True))
        serial = told["initial_state"].clone()
        fused_recurrent_gated_delta_rule(**told)
        told["num_accepted_tokens"] = torch.full_like(told["num_accepted_tokens"], accepted)
        got, _ = fused_recurrent_gated_delta_rule(**told)
        plain = {name: x for name, x in told.items() if name != "num_accepted_tokens"}
        plain |= {"initial_state": serial, "ssm_state_indices": told["ssm_state_indices"][:, 0]}
        first = {name: told[name][:, :accepted] for name in ("q", "k", "v", "g", "beta")}
        fused_recurrent_gated_delta_rule(**(plain | first))
        want, _ = fused_recurrent_gated_delta_rule(**plain)
        assert_close(f"o, accepted {accepted}", got, want, torch.float32)


CHUNK, ROW, UPDATE = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, fused_sigmoid_gating_delta_rule_update
TABLE: Any = "a call of fused_recurrent_gated_delta_rule with a table"


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: list[tuple[Any, type[Exception], str, dict[str, Any]]] = [
    (CHUNK, TypeError, "q: expected a tensor, got list", {"q": [1.0]}),
    (CHUNK, TypeError, "q: expected torch.float32", {"q": normal(1, 4, 1, 16).double()}),
    (CHUNK, ValueError, "q: expected shape .batch, tokens, H, K.", {"q": normal(4, 1, 16)}),
    (CHUNK, ValueError, "k: expected shape .batch=1, tokens=4, H=1, K=16.", {"k": normal(1, 3, 1, 16)}),
    (CHUNK, TypeError, "v: expected torch.float32, got torch.float16", {"v": normal(1, 4, 2, 8).half()}),
    (CHUNK, ValueError, "v: expected a multiple of the 1 heads of q, got 0", {"v": normal(1, 4, 0, 8)}),
    (CHUNK, ValueError, "v: expected V of 1..256, got 257", {"v": normal(1, 4, 2, 257)}),
    (CHUNK, ValueError, "g: expected shape .batch=1, tokens=4, HV=2.", {"g": normal(4, 2)}),
    (CHUNK, TypeError, "beta: expected torch.float32", {"beta": ints(1)}),
    (CHUNK, TypeError, "g: expected a tensor, got NoneType", {"g": None}),
    (CHUNK, TypeError, "beta: expected a tensor, got NoneType", {"beta": None}),
    (ROW, TypeError, "g: expected a tensor, got NoneType", {"g": None}),
    (UPDATE, TypeError, "a: expected a tensor, got NoneType", {"a": None}),
    (CHUNK, TypeError, "scale: expected a number, got True", {"scale": True}),
    (CHUNK, TypeError, "scale: expected a number, got '1'", {"scale": "1"}),
    (CHUNK, ValueError, "scale: expected a finite number above 0, got -1", {"scale": -1}),
    (ROW, ValueError, "scale: expected a finite number above 0, got nan", {"scale": float("nan")}),
    (ROW, ValueError, "scale: expected a finite number above 0, got inf", {"scale": float("inf")}),
    (CHUNK, ValueError, "initial_state: expected shape .N=2, HV=2, V=8, K=16.", {"initial_state": normal(3, 2, 8, 16)}),
    (CHUNK, ValueError, "initial_state: expected shape .N=2, HV=2, V=8, K=16.", {"initial_state": normal(2, 2, 16, 8)}),
    (CHUNK, TypeError, "cu_seqlens: expected torch.int32 or torch.int64", {"cu_seqlens": normal(3)}),
    (CHUNK, ValueError, "cu_seqlens: expected at least 1 rows, got 0", {"cu_seqlens": ints()}),
    (CHUNK, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(0, 3, 2)}),
    (CHUNK, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(0, 3, 5)}),
    (CHUNK, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(-1, 3, 4)}),
    (ROW, ValueError, "cu_seqlens: expected offsets that rise within 0..4", {"cu_seqlens": ints(0, 3, 5)}),
    (ROW, TypeError, "initial_state: expected a tensor, got None", {"initial_state": None}),
    (
        ROW,
        TypeError,
        "initial_state: expected torch.float32 or torch.bfloat16",
        {"initial_state": normal(9, 2, 8, 16).half()},
    ),
    (ROW, ValueError, "initial_state: expected shape .lines, HV=2", {"initial_state": normal(9, 1, 8, 16)}),
    (ROW, ValueError, "initial_state: expected a contiguous", {"initial_state": normal(9, 2, 16, 8).transpose(2, 3)}),
    (ROW, ValueError, "initial_state: expected shape .lines=2", {"ssm_state_indices": None}),
    (ROW, ValueError, "inplace_final_state: expected True", {"inplace_final_state": False}),
    (ROW, TypeError, "ssm_state_indices: expected torch.int32", {"ssm_state_indices": normal(2)}),
    (ROW, ValueError, "ssm_state_indices: expected shape .rows.", {"ssm_state_indices": ints(1, 2)[None, None]}),
    (ROW, ValueError, "ssm_state_indices: expected at least 2 rows, got 1", {"ssm_state_indices": ints(1)}),
    (ROW, ValueError, "ssm_state_indices: expected slots below 9, got 9", {"ssm_state_indices": ints(1, 9)}),
    (ROW, ValueError, "ssm_state_indices: expected no slot that two rows write", {"ssm_state_indices": ints(1, 1)}),
    (
        ROW,
        ValueError,
        "num_accepted_tokens: expected None, as ssm_state_indices is no",
        {"num_accepted_tokens": ints(1, 1)},
    ),
    (
        ROW,
        ValueError,
        "num_accepted_tokens: expected None, as ssm_state_indices is not given",
        {"num_accepted_tokens": ints(1, 1), "ssm_state_indices": None},
    ),
    (TABLE, ValueError, "num_accepted_tokens: expected at least 2 rows", {"num_accepted_tokens": ints(1)}),
    (
        TABLE,
        ValueError,
        "ssm_state_indices: expected at least 1 columns",
        {"ssm_state_indices": ints(1, 2)[:, None][:, :0]},
    ),
    (
        TABLE,
        ValueError,
        "cu_seqlens: expected rows of at most 1 tokens, got 3",
        {"ssm_state_indices": ints(1, 2)[:, None]},
    ),
    (
        TABLE,
        ValueError,
        "ssm_state_indices: expected slots below 9, got 11",
        {"ssm_state_indices": torch.tensor([[1, 2, 3], [11, 5, 6]])},
    ),
    (
        TABLE,
        ValueError,
        "ssm_state_indices: expected no slot that two rows write, got slot 3",
        {"ssm_state_indices": torch.tensor([[1, 2, 3], [3, 5, 6]])},
    ),
    (
        TABLE,
        ValueError,
        "ssm_state_indices: expected no slot that one row reads and another writes, got slot 3",
        {"ssm_state_indices": torch.tensor([[1, 2, 3], [4, 3, 6]])},
    ),
    (UPDATE, TypeError, "softplus_beta: expected a number, got None", {"softplus_beta": None}),
    (UPDATE, ValueError, "softplus_beta: expected a finite number above 0, got 0", {"softplus_beta": 0}),
    (UPDATE, TypeError, "softplus_threshold: expected a number", {"softplus_threshold": "20"}),
    (UPDATE, ValueError, "A_log: expected shape .HV=2.", {"A_log": normal(3)}),
    (UPDATE, TypeError, "dt_bias: expected a tensor, got NoneType", {"dt_bias": None}),
    (UPDATE, ValueError, "a: expected shape .batch . tokens=4, HV=2.", {"a": normal(3, 2)}),
    (UPDATE, ValueError, "b: expected shape .batch=1, tokens=4, HV=2.", {"b": normal(1, 3, 2)}),
    (UPDATE, TypeError, "initial_state_source: expected a tensor, got None", {"initial_state_source": None}),
    (UPDATE, TypeError, "initial_state_indices: expected a tensor, got NoneType", {"initial_state_indices": None}),
    (
        UPDATE,
        ValueError,
        "initial_state_indices: expected shape .rows.",
        {"initial_state_indices": ints(1, 2)[:, None]},
    ),
    (
        UPDATE,
        ValueError,
        "initial_state_indices: expected slots below 9, got 12",
        {"initial_state_indices": ints(12, 1)},
    ),
]


@pytest.mark.parametrize(("function", "error", "message", "change"), WRONG, ids=[message for _, _, message, _ in WRONG])
def test_the_wrong_argument_is_named(
    function: Any, error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    path = Path("cpu", torch.float32)
    if function is CHUNK:
        good = good_chunk(path, Case([3, 1]))
    elif function is UPDATE:
        good = good_update(path, Case([3, 1], [4, 1]))
    else:
        table = Case([3, 1], [[4, 1, 7], [2, 5, 0]], [1, 2])
        good = good_rows(path, table if function is TABLE else Case([3, 1], [4, 1]))
    run = ROW if function is TABLE else function
    run(**good)
    states = good["initial_state_source" if function is UPDATE else "initial_state"]
    before = states.clone()
    with pytest.raises(error, match="^" + message):
        run(**(good | change))
    assert torch.equal(states, before)


def test_a_batch_beside_offsets_is_refused() -> None:
    good = good_rows(Path("cpu", torch.float32), Case([2] * 2, [4, 1], dense=True))
    with pytest.raises(ValueError, match=r"^q: expected a batch of 1, as cu_seqlens is given, got 2"):
        ROW(**(good | {"cu_seqlens": ints(0, 2, 4)}))
    with pytest.raises(ValueError, match=r"^ssm_state_indices: expected at least 2 columns, got 1"):
        ROW(**(good | {"ssm_state_indices": ints(4, 1)[:, None]}))


def test_what_is_said_of_skipped_rows_is_not_checked() -> None:
    good = good_rows(Path("cpu", torch.float32), Case([3, 0, 2], [[4, -1, 99], [99, 99, 99], [2, 5, 99]], [1, 9, 1]))
    o, _ = ROW(**good)
    assert not o[:, :3].any() and o[:, 3:].any()


SIGNATURES = {
    CHUNK: "q k v g beta scale=None initial_state=None output_final_state=False cu_seqlens=None "
    "use_qk_l2norm_in_kernel=False",
    ROW: "q k v g beta=None scale=None initial_state=None inplace_final_state=True cu_seqlens=None "
    "ssm_state_indices=None num_accepted_tokens=None use_qk_l2norm_in_kernel=False",
    UPDATE: "A_log a dt_bias softplus_beta softplus_threshold q k v b initial_state_source initial_state_indices "
    "scale=None use_qk_l2norm_in_kernel=False cu_seqlens=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_engines_may_pass_arguments_by_position(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    told = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(told) == SIGNATURES[function]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


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

    run()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    chunk["cu_seqlens"].copy_(ints(0, 0, 70))
    row["ssm_state_indices"].copy_(ints(-1, 8))
    table["ssm_state_indices"].copy_(torch.tensor([[8, 6, 3], [-1, 5, 0]]))
    table["num_accepted_tokens"].copy_(ints(3, 1))
    table["cu_seqlens"].copy_(ints(0, 1, 5))
    update["initial_state_indices"].copy_(ints(0, -1))
    states = [row["initial_state"], table["initial_state"], update["initial_state_source"]]
    before = [state.clone() for state in states]
    graph.replay()
    got = [x.clone() for x in (*captured, *states)]
    for state, old in zip(states, before, strict=True):
        state.copy_(old)
    for x, want in zip(got, [*run(), *states], strict=True):
        assert same_bits(x, want)


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
