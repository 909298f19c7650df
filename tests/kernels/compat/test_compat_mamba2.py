"""The engines' selective state update against a plain one. Whatever must not be read is NaN, and stays NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.field_mamba2 import Tokens
from rigs.kernels.field_recurrence import field_moves, field_slots, field_table
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import selective_state_update
from deltaline_kernels.compat.mamba2_inputs import pack_update
from deltaline_kernels.mamba2.inputs import MambaInputs

NUM_SLOTS = 9


@dataclass(frozen=True)
class Case:
    """Rows of a call; `slots` of the rows, or a table; None: row i has slot i. `dense`: one token each, no offsets."""

    lengths: Sequence[int]
    slots: Any = None
    accepted: Sequence[int] | None = None
    dense: bool = False
    packed: bool = True
    heads: tuple[int, int, int, int] = (1, 2, 8, 16)
    states: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    rates: torch.dtype = torch.float32
    bias: bool = True
    skip: bool = True
    gate: bool = False
    softplus: bool = True
    out: torch.dtype | None = None
    pad: int = -1
    more: int = 0
    # x is of 16 bits, B and C are of 32.
    mixed: bool = False

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


CASES = {
    "decode": Case([1] * 4, [4, 0, 7, 2], dense=True),
    "decode-of-offsets": Case([1] * 4, [4, 0, 7, 2]),
    "without-indices": Case([1] * 3, dense=True),
    "ragged": Case([2, 0, 1, 5], [4, 1, 0, 2], index=torch.int64),
    "ragged-without-indices": Case([2, 0, 1, 5]),
    "apart": Case([3, 1], [4, 1], packed=False),
    "padding": Case([1, 2, 1, 0, 3], [-1, 4, -1, -1, 0]),
    "padding-with-a-gate": Case([1] * 3, [-1, 4, -1], dense=True, gate=True),
    "padding-of-vllm": Case([1] * 4, [0, 4, 0, 2], dense=True, pad=0),
    "padding-of-another-slot": Case([1, 2, 1], [7, 4, -3], pad=7),
    "only-padding": Case([1, 2], [-1, -7]),
    "more-slots-than-rows": Case([1, 2], [4, 8], more=3),
    "no-rows": Case([], []),
    "groups": Case([2, 1], [3, 8], heads=(2, 4, 12, 24)),
    "states-of-bf16": Case([3, 1], [4, 2], states=torch.bfloat16),
    "states-of-fp16": Case([3, 1], [4, 2], states=torch.float16),
    "plain": Case([3, 1], [4, 2], bias=False, skip=False, softplus=False),
    "gated": Case([3, 1], [4, 2], gate=True),
    "outputs-of-fp32": Case([3, 1], [4, 2], out=torch.float32),
    "groups-of-fp32": Case([3, 1], [4, 2], mixed=True),
    "rates-of-16-bits": Case([2, 1], [4, 2], rates=torch.bfloat16),
    "first-column-of-a-table": Case([2, 1], [[4, 1], [2, 5]]),
}
TABLES = {
    "verify": Case([3] * 2, [[4, 1, 7], [2, 5, 0]], [1, 3]),
    "verify-of-one-token": Case([1] * 3, [[4, 1], [2, 5], [8, 3]], [1, 2, 2], dense=True),
    "ragged": Case([2, 0, 1, 3], [[4, 1, 7], [2, 5, 5], [8, 3, 8], [6, 0, 2]], [3, 1, 1, 2], more=2),
    "counts-out-of-range": Case([2, 2], [[4, 1], [2, 5]], [0, 9]),
    "padding": Case([2, 2, 2], [[-1, -1], [4, 1], [-1, 3]], [1, 2, 1]),
    "padding-of-vllm": Case([2, 2], [[0, 0], [4, 1]], [1, 2], pad=0),
    "states-of-bf16": Case([3, 2], [[4, 1, 7], [2, 5, 0]], [1, 3], states=torch.bfloat16),
    "states-of-fp16": Case([3, 2], [[4, 1, 7], [2, 5, 0]], [1, 3], states=torch.float16),
    "gated": Case([2, 1], [[4, 1], [2, 5]], [2, 1], gate=True),
}
# Rows of several tokens each, in a dimension of their own.
SEVERAL = {
    "several": Case([3] * 3, [4, 0, 7], dense=True),
    "without-indices": Case([2] * 3, dense=True),
    "apart": Case([3] * 2, [4, 1], dense=True, packed=False),
    "padding-with-a-gate": Case([2] * 3, [-1, 4, -1], dense=True, gate=True),
    "states-of-bf16": Case([5] * 2, [4, 2], dense=True, states=torch.bfloat16, heads=(2, 4, 12, 24)),
    "outputs-of-fp32": Case([3] * 2, [4, 2], dense=True, out=torch.float32),
}


def make_call(case: Case, path: Path) -> tuple[Tokens, dict[str, Any]]:
    """Make random tokens for the case, NaN where rows are skipped; and the function's keywords, on the device."""
    G, H, P, S = case.heads
    T = case.starts[-1]
    wide = normal(T, H * P + 2 * G * S + 3, seed=0)
    dt, z = normal(T, H, seed=1), normal(T, H, P, seed=2)
    for i, slots in enumerate(case.slots or ()):
        used = slots if isinstance(slots, list) else [slots]
        if all(slot < 0 or slot == case.pad for slot in used):
            for tokens in (wide, dt, z):
                tokens[case.starts[i] : case.starts[i + 1]] = torch.nan
    wide, dt, z = wide.to(path.dtype), dt.to(path.dtype), z.to(path.dtype)
    if not case.softplus:
        dt = dt.abs()
    x, B, C, _ = wide.to(path.device).split((H * P, G * S, G * S, 3), dim=1)
    x, B, C = x.unflatten(1, (H, P)), B.unflatten(1, (G, S)), C.unflatten(1, (G, S))
    if not case.packed:
        x, B, C = x.contiguous(), B.clone(), C.contiguous()
    if case.mixed:
        x, B, C = x.to(path.narrow), B.float(), C.float()
    A, D, bias = -normal(H, seed=3).exp(), normal(H, seed=4), normal(H, seed=5)
    A, D, bias = (values.to(case.rates) for values in (A, D, bias))
    told: dict[str, Any] = {
        "x": x,
        "dt": dt.to(path.device)[..., None].expand(T, H, P),
        "A": A.to(path.device)[:, None, None].expand(H, P, S),
        "B": B,
        "C": C,
        "dt_softplus": case.softplus,
        "pad_slot_id": case.pad,
    }
    if case.skip:
        told["D"] = D.to(path.device)[:, None].expand(H, P)
    if case.bias:
        told["dt_bias"] = bias.to(path.device)[:, None].expand(H, P)
    if case.gate:
        told["z"] = z.to(path.device)
    if case.out is not None:
        told["out"] = torch.empty(T, H, P, dtype=case.out, device=path.device)
    if case.slots is not None:
        slots = torch.tensor(case.slots, dtype=case.index)
        more = torch.full((case.more, *slots.shape[1:]), 10**6).to(slots)
        told["state_batch_indices"] = torch.cat((slots, more)).to(path.device)
    if case.accepted is not None:
        told["num_accepted_tokens"] = torch.tensor([*case.accepted, *[7] * case.more]).int().to(path.device)
    if not case.dense:
        told["cu_seqlens"] = torch.tensor(case.starts, dtype=case.index, device=path.device)
    host = Tokens(
        x.cpu(),
        dt,
        A,
        B.cpu(),
        C.cpu(),
        D if case.skip else None,
        z if case.gate else None,
        bias if case.bias else None,
        case.softplus,
    )
    return host, told


def by_row(told: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the keywords with so many tokens of each row in a dimension of their own."""
    names = {"x", "dt", "B", "C", "z", "out"} & told.keys()
    return told | {name: told[name].unflatten(0, (-1, length)) for name in names}


def make_states(case: Case, used: Sequence[int]) -> Tensor:
    """Return states of slots that are NaN but where they are used."""
    _, H, P, S = case.heads
    states = torch.full((NUM_SLOTS, H, P, S), torch.nan)
    for slot in used:
        if slot >= 0 and slot != case.pad:
            states[slot] = normal(H, P, S, seed=10 + slot)
    return states.to(case.states)


def check(got: Tensor, want: Tensor, told: dict[str, Any], pool: Tensor, want_pool: Tensor) -> None:
    """Compare outputs and states; those that are computed in fp32 as such, whatever the dtype of the tokens."""
    assert got.shape == told["x"].shape
    assert got is told["out"] if "out" in told else got.dtype == told["x"].dtype
    assert_close("y", got, want, told["x"].dtype)
    assert_close("state", pool, want_pool, pool.dtype)


@pytest.mark.parametrize("name", CASES)
def test_update_matches_the_reference(path: Path, name: str) -> None:
    case = CASES[name]
    tokens, told = make_call(case, path)
    slots = list(range(len(case.lengths))) if case.slots is None else case.slots
    slots = [row[0] if isinstance(row, list) else row for row in slots]
    want_pool = make_states(case, slots)
    pool = want_pool.to(path.device, copy=True)
    kept = {key: x.clone() for key, x in told.items() if isinstance(x, Tensor) and key != "out"}
    want = field_slots(tokens, case.starts, want_pool, slots, case.pad)
    check(selective_state_update(pool, **told), want, told, pool, want_pool)
    assert all(torch.equal(told[key].nan_to_num(7.0), x.nan_to_num(7.0)) for key, x in kept.items())


@pytest.mark.parametrize("name", TABLES)
def test_update_of_a_table_matches_the_reference(path: Path, name: str) -> None:
    case = TABLES[name]
    tokens, told = make_call(case, path)
    assert case.accepted is not None
    first = [row[min(max(n, 1), len(row)) - 1] for row, n in zip(case.slots, case.accepted, strict=True)]
    want_pool = make_states(case, first)
    pool = want_pool.to(path.device, copy=True)
    want = field_table(tokens, case.starts, want_pool, case.slots, case.accepted, case.pad)
    check(selective_state_update(pool, **told), want, told, pool, want_pool)


@pytest.mark.parametrize("name", SEVERAL)
def test_update_of_several_tokens_matches_the_reference(path: Path, name: str) -> None:
    case = SEVERAL[name]
    tokens, told = make_call(case, path)
    told = by_row(told, case.lengths[0])
    slots = list(range(len(case.lengths))) if case.slots is None else case.slots
    want_pool = make_states(case, slots)
    pool = want_pool.to(path.device, copy=True)
    want = field_slots(tokens, case.starts, want_pool, slots, case.pad).view(told["x"].shape)
    check(selective_state_update(pool, **told), want, told, pool, want_pool)


def test_a_time_step_of_a_head_stays_one_where_tokens_are_apart(path: Path) -> None:
    """It decides which recurrence runs, so the bits are those of time steps that lie together."""
    case = SEVERAL[next(iter(SEVERAL))]
    told = by_row(make_call(case, path)[1], case.lengths[0])
    values = told["dt"][..., 0]
    apart = torch.cat((values, values), dim=1)[:, : values.shape[1]].unsqueeze(-1).expand_as(told["dt"])
    assert values.shape[0] > 1 and not told["dt"].stride(-1) and apart.flatten(0, 1).stride(-1)
    slots = list(range(len(case.lengths))) if case.slots is None else case.slots
    pools = [make_states(case, slots).to(path.device) for _ in range(2)]
    got, want = (
        selective_state_update(pool, **told | {"dt": dt}) for pool, dt in zip(pools, (apart, told["dt"]), strict=True)
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("entries", [None, [0, 3, 5]])
def test_states_of_each_token_go_to_a_buffer(path: Path, entries: list[int] | None, keeps: bool) -> None:
    """And to their slots, or not. What is no slot may be an entry."""
    case = Case([3] * 3, [4, 0, 2], dense=True, pad=0, states=torch.bfloat16, gate=True)
    tokens, told = make_call(case, path)
    told = by_row(told, 3) | {"cache_steps": 4, "disable_state_update": not keeps}
    if entries is not None:
        told["intermediate_state_indices"] = torch.tensor(entries, device=path.device)
    before = make_states(case, [4, 2])
    wanted = torch.full((6, 4, *before.shape[1:]), torch.nan)
    places = [[4 * entry + t for t in range(3)] for entry in entries or case.slots]
    want = field_moves(tokens, case.starts, before, [4, -1, 2], wanted.flatten(0, 1), places, each=True)
    pool, buffer = before.to(path.device, copy=True), torch.full_like(wanted, torch.nan, device=path.device)
    y = selective_state_update(pool, **told, intermediate_states_buffer=buffer)
    assert_close("buffer", buffer, wanted, torch.float32)
    if keeps:
        field_slots(tokens, case.starts, before, case.slots, case.pad)
    check(y, want.view(y.shape), told, pool, before)


@pytest.mark.parametrize("slots", [None, [4, 4, 2]])
def test_states_are_not_updated_on_request(path: Path, slots: list[int] | None) -> None:
    """Rows may share a state then."""
    case = Case([1] * 3, slots, dense=True)
    tokens, told = make_call(case, path)
    states = make_states(case, range(NUM_SLOTS))
    pool = states.to(path.device, copy=True)
    want = field_moves(tokens, case.starts, states, slots or [0, 1, 2], states, [[-1]] * 3, each=False)
    check(selective_state_update(pool, **told, disable_state_update=True), want, told, pool, states)


def test_engines_names_are_taken(path: Path) -> None:
    """vLLM's name of the slot of padding, and what engines pass that changes nothing; compiled, too."""
    case = replace(CASES["padding"], slots=[0, 4, 0, 0, 2])
    _, told = make_call(replace(case, pad=0), path)
    unused: dict[str, Any] = {"is_blackwell": False, "enable_stochastic_rounding": False, "cache_philox_rounds": 0}
    unused |= {"disable_state_update": False, "cache_steps": None, "retrieve_parent_token": None}
    unused |= {"algorithm": "simple", "backend": "auto", "philox_rounds": 10}
    unused |= dict.fromkeys(("state_scale", "intermediate_state_scales", "rand_seed"))
    pool, other = (make_states(case, [4, 2]).to(path.device) for _ in range(2))
    want = selective_state_update(pool, **told)
    update = torch.compile(selective_state_update, fullgraph=True, backend="eager")
    got = update(other, **(told | unused | {"pad_slot_id": -1, "null_block_id": 0}))
    assert torch.equal(got, want) and torch.equal(other.nan_to_num(7.0), pool.nan_to_num(7.0))
    assert not want[0].any() and want[1].any()


def test_columns_of_one_tensor_are_not_copied() -> None:
    for packed in (True, False):
        _, told = make_call(replace(CASES["decode"], packed=packed), Path("cpu", torch.float32))
        parts = {name: told[name] for name in ("x", "dt", "A", "B", "C")}
        operands = pack_update(**parts, D=None, z=None, dt_bias=None, softplus=True)
        assert isinstance(operands, MambaInputs)
        assert (operands.xBC.data_ptr() == told["x"].data_ptr()) == packed


def test_arguments_are_named_when_they_are_wrong() -> None:
    _, good = make_call(CASES["ragged"], Path("cpu", torch.float32))
    good["state"] = make_states(CASES["ragged"], range(NUM_SLOTS))
    T, H, P = good["x"].shape
    buffer = {"intermediate_states_buffer": torch.zeros(9, 5, *good["state"].shape[1:])}
    selective_state_update(**{**good, **buffer, "state": good["state"].clone()})
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "x", {"x": good["x"].double()}),
        (ValueError, "dt", {"dt": good["dt"][..., :1]}),
        (ValueError, "A", {"A": good["A"][0]}),
        (ValueError, "B", {"B": good["B"][:1]}),
        (TypeError, "C", {"C": good["C"].double()}),
        (ValueError, "D", {"D": torch.ones(H)}),
        (ValueError, "dt_bias", {"dt_bias": torch.ones(H)}),
        (ValueError, "z", {"z": torch.ones(T, H)}),
        (ValueError, "out", {"out": torch.ones(T, H, 2 * P)[..., ::2]}),
        (ValueError, "state", {"state": good["state"].transpose(2, 3).contiguous().transpose(2, 3)}),
        (ValueError, "state", {"state": good["state"][:2], "state_batch_indices": None}),
        (ValueError, "state_batch_indices", {"state_batch_indices": torch.ones(3, dtype=torch.int32)}),
        (ValueError, "state_batch_indices", {"state_batch_indices": torch.tensor([4, 1, 99, 2])}),
        (ValueError, "state_batch_indices", {"state_batch_indices": torch.tensor([4, 1, 2, 2])}),
        (ValueError, "num_accepted_tokens", {"num_accepted_tokens": torch.ones(4, dtype=torch.int32)}),
        (ValueError, "cu_seqlens", {"cu_seqlens": torch.tensor([0, 2, 1, 3, 8])}),
        (TypeError, "pad_slot_id", {"pad_slot_id": 0.5}),
        (TypeError, "null_block_id", {"null_block_id": torch.zeros(1, dtype=torch.int32)}),
        (TypeError, "dt_softplus", {"dt_softplus": good["x"]}),
        (ValueError, "enable_stochastic_rounding", {"enable_stochastic_rounding": True}),
        (ValueError, "state_scale", {"state_scale": torch.ones(NUM_SLOTS, H, P)}),
        (ValueError, "rand_seed", {"rand_seed": torch.ones(1, dtype=torch.int64)}),
        (ValueError, "intermediate_states_buffer", {"intermediate_states_buffer": good["state"]}),
        (TypeError, "is_kimi", {"is_kimi": False}),
        (ValueError, "retrieve_parent_token", {"retrieve_parent_token": torch.zeros(4, 1)}),
        (ValueError, "cu_seqlens", by_row(good, T)),
        (ValueError, "B", by_row(good, T) | {"B": good["B"], "cu_seqlens": None}),
        (ValueError, "out", by_row(good, T) | {"out": good["x"], "cu_seqlens": None}),
        (TypeError, "disable_state_update", {"disable_state_update": 1}),
        (ValueError, "final_state", {"disable_state_update": True, "final_state": good["state"]}),
        (ValueError, "num_accepted_tokens", buffer | {"num_accepted_tokens": torch.ones(4)}),
        (ValueError, "state_batch_indices", buffer | {"state_batch_indices": None}),
        (ValueError, "intermediate_states_buffer", buffer | {"cache_steps": 3}),
        (ValueError, "intermediate_state_indices", buffer | {"intermediate_state_indices": torch.arange(3)}),
    ]
    for error, name, change in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            selective_state_update(**(good | change))


def test_a_row_longer_than_its_table_is_refused_on_the_cpu() -> None:
    _, told = make_call(Case([3, 1], [[4, 1], [2, 5]], [1, 2]), Path("cpu", torch.float32))
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected rows of at most 2 tokens, got 3"):
        selective_state_update(make_states(CASES["ragged"], range(NUM_SLOTS)), **told)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_update_runs_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """A replay follows what the index tensors hold by then, and nothing waits for the device."""
    path = Path("cuda", dtype)
    calls = []
    for case in (CASES["decode"], replace(CASES["ragged"], gate=True), TABLES["verify"]):
        _, told = make_call(case, path)
        told["out"] = torch.empty(told["x"].shape, dtype=dtype, device="cuda")
        told["state"] = make_states(case, range(NUM_SLOTS)).to("cuda")
        calls.append(told)

    def run() -> list[Tensor]:
        return [selective_state_update(**told) for told in calls]

    def change() -> None:
        calls[0]["state_batch_indices"].copy_(torch.tensor([-1, 8, 3, 1]))
        calls[1]["cu_seqlens"].copy_(torch.tensor([0, 0, 3, 4, 8]))
        calls[2]["num_accepted_tokens"].copy_(torch.tensor([3, 2]))

    run()
    with no_waits():
        run()
    check_replay(run, [told[name] for told in calls for name in ("state", "out")], change)
