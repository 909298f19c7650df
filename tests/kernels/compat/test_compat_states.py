"""Where engines may have their states: apart in memory, in slots to read and others to write, and in two tensors.

Whatever must not be read is NaN, and whatever must not be written keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kernels.compat.test_compat_mamba2 as mamba
import pytest
import torch
from rigs.kernels.delta_calls import NUM_SLOTS, Case, good_chunk, good_rows, make_call
from rigs.kernels.draws import normal
from rigs.kernels.field_gated_delta import field_gates
from rigs.kernels.field_recurrence import field_moves
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_sigmoid_gating_delta_rule_update,
    mamba_chunk_scan_combined_varlen,
    selective_state_update,
)


@dataclass(frozen=True)
class Move:
    """Rows that begin with `slots` and leave states in `targets`, of a final tensor of that dtype if one is told."""

    lengths: list[int]
    slots: list[Any]
    targets: list[Any] | None
    accepted: list[int] | None = None
    final: torch.dtype | None = None
    states: torch.dtype = torch.float32
    dense: bool = False

    @property
    def each(self) -> bool:
        return self.accepted is not None

    @property
    def begins(self) -> list[int]:
        if self.accepted is None:
            return self.slots
        return [row[min(max(n, 1), len(row)) - 1] for row, n in zip(self.slots, self.accepted, strict=True)]

    @property
    def kept(self) -> list[list[int]]:
        """The targets of each row."""
        return [x if isinstance(x, list) else [x] for x in (self.slots if self.targets is None else self.targets)]


HALF, BF16 = torch.float16, torch.bfloat16
MOVES = {
    "decode": Move([1] * 4, [4, 0, 7, 4], [3, 1, 2, 8], dense=True),
    "in-place": Move([1] * 3, [4, 5, 6], None, dense=True),
    "in-place-of-several-tokens": Move([2, 2, 1], [4, 5, 0], None),
    "to-where-it-was": Move([1, 2], [4, 0], [4, 5]),
    "skipped-and-kept-nowhere": Move([1, 2, 1, 5], [-1, 4, 3, 0], [5, -1, 6, 7]),
    "empty": Move([2, 0, 0, 1], [4, 0, -1, 7], [3, 1, 2, 8]),
    "only-empty": Move([0, 0], [4, 7], [3, -1]),
    "no-rows": Move([], [], []),
    "final": Move([1] * 3, [4, 0, 7], None, final=BF16, dense=True),
    "final-of-empty": Move([2, 0, 1], [4, 0, -1], None, final=HALF, states=HALF),
    "final-and-slots": Move([2, 0, 3], [4, 4, 4], [0, 4, 7], final=torch.float32, states=BF16),
    "table": Move([2, 3], [[4, 0], [1, 7]], [[3, 5, 8], [2, 6, 1]], [1, 2]),
    "table-with-gaps": Move([3, 0, 2], [[4], [0], [-1]], [[3, -1, 8], [2, 2, 2], [6, 7, 5]], [1, 1, 1]),
    "table-to-final": Move([2, 2], [[4, 0, 5], [1, 7, 3]], [[4, 0], [1, -1]], [2, 3], final=BF16, dense=True),
}
NAMES = pytest.mark.parametrize("name", MOVES)


def lie_apart(states: Tensor, gap: int = 32) -> tuple[Tensor, Tensor]:
    """Return the states in a room with `gap` bytes behind each, and those bytes, which are 255."""
    size = states[0].numel() * states.element_size()
    room = torch.full((len(states), size + gap), 255, dtype=torch.uint8, device=states.device)
    placed = room[:, :size].view(states.dtype).unflatten(1, states.shape[1:])
    placed.copy_(states)
    assert not placed.is_contiguous()
    return placed, room[:, size:]


def bits(states: Tensor) -> Tensor:
    """Return what can be compared, NaN or not."""
    return states.contiguous().view(torch.uint8).cpu()


def ints(values: list[Any], device: str, columns: bool = False) -> Tensor:
    made = torch.tensor(values, dtype=torch.int32, device=device)
    return made.view(len(values), -1) if columns and values else made


def make_pools(move: Move, size: tuple[int, int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states that are read, NaN where nothing is, those that are written, and the bytes behind the former.

    What is written is one and the same unless there is a final tensor.
    """
    states = torch.full((NUM_SLOTS, *size), torch.nan)
    for slot in move.begins:
        if slot >= 0:
            states[slot] = normal(*size, seed=10 + slot)
    pool, behind = lie_apart(states.to(device, move.states))
    final = pool if move.final is None else lie_apart(torch.full_like(states, torch.nan).to(device, move.final), 8)[0]
    return pool, final, behind


def check_move(
    move: Move, tokens: Any, size: tuple[int, int, int], path: Path, call: Callable[..., Tensor], *, each: bool
) -> None:
    """Compare outputs and states with those of the engines' semantics; `call` is given the pool and the keywords."""
    pool, final, behind = make_pools(move, size, path.device)
    before, final_before = pool.cpu().clone(), final.cpu().clone()
    want = final_before.clone() if final is not pool else before.clone()
    starts = [sum(move.lengths[:i]) for i in range(len(move.lengths) + 1)]
    o = field_moves(tokens, starts, before, move.begins, want, move.kept, each=each)
    told: dict[str, Any] = {} if final is pool else {"final_state": final}
    if move.targets is not None:
        told["targets"] = ints(move.targets, path.device, columns=each)
    got = call(pool, ints(move.slots, path.device, columns=each), told)
    assert_close("o", got.reshape(o.shape), o, path.dtype)
    limit = {torch.float32: torch.float32, HALF: HALF, BF16: BF16}[final.dtype]
    assert_close("states", final, want, limit)
    used = {slot for row, n in zip(move.kept, move.lengths, strict=True) for slot in (row[:n] if each else row[:1])}
    others = [slot for slot in range(NUM_SLOTS) if slot not in used]
    assert torch.equal(bits(final[others]), bits(final_before[others])) and bool((behind == 255).all())
    assert final is pool or torch.equal(bits(pool), bits(before))


@NAMES
def test_recurrent_leaves_states_elsewhere(path: Path, name: str) -> None:
    move = MOVES[name]
    case = Case(move.lengths, move.slots, dense=move.dense)
    made = make_call(case, path)
    arguments = made.arguments(g=made.tokens.g, beta=made.tokens.beta)

    def call(pool: Tensor, slots: Tensor, told: dict[str, Any]) -> Tensor:
        told = {"output_state_indices" if key == "targets" else key: x for key, x in told.items()}
        if move.accepted is not None:
            told["num_accepted_tokens"] = ints(move.accepted, path.device)
        o, final = fused_recurrent_gated_delta_rule(**arguments, initial_state=pool, ssm_state_indices=slots, **told)
        assert final is told.get("final_state", pool)
        return o

    _, HV, K, V = case.heads
    check_move(move, made.tokens, (HV, V, K), path, call, each=move.each)


@pytest.mark.parametrize("name", [name for name, move in MOVES.items() if not move.each])
def test_sigmoid_update_leaves_states_elsewhere(path: Path, name: str) -> None:
    move = MOVES[name]
    case = Case(move.lengths, move.slots, dense=move.dense)
    made, (_, HV, K, V) = make_call(case, path), case.heads
    rates, biases = normal(HV, seed=3), normal(HV, seed=4).to(path.dtype)
    a, b = normal(2, case.starts[-1], HV, seed=5).to(path.dtype)
    g, beta = field_gates(rates, a, biases, b, 1.0, 20.0)
    weights = {"A_log": rates.to(path.device), "dt_bias": biases.to(path.device)}
    arguments = made.arguments(a=a, b=b) | weights | {"softplus_beta": 1.0, "softplus_threshold": 20.0}

    def call(pool: Tensor, slots: Tensor, told: dict[str, Any]) -> Tensor:
        told = {"output_state_indices" if key == "targets" else key: x for key, x in told.items()}
        places: dict[str, Any] = {"initial_state_source": pool, "initial_state_indices": slots}
        o: Tensor = fused_sigmoid_gating_delta_rule_update(**arguments, **places, **told)
        return o

    check_move(move, replace(made.tokens, g=g, beta=beta), (HV, V, K), path, call, each=False)


@NAMES
def test_update_of_mamba2_leaves_states_elsewhere(path: Path, name: str) -> None:
    move = MOVES[name]
    case = mamba.Case(move.lengths, move.slots, dense=move.dense and max(move.lengths) == 1)
    tokens, arguments = mamba.make_call(case, path)
    del arguments["state_batch_indices"]

    def call(pool: Tensor, slots: Tensor, told: dict[str, Any]) -> Tensor:
        told = {"dst_state_batch_indices" if key == "targets" else key: x for key, x in told.items()}
        if move.accepted is not None:
            told["num_accepted_tokens"] = ints(move.accepted, path.device)
        return selective_state_update(pool, **arguments, state_batch_indices=slots, **told)

    _, H, P, S = case.heads
    check_move(move, tokens, (H, P, S), path, call, each=move.each)


def test_rows_without_slots_leave_states_in_a_final_tensor(path: Path) -> None:
    """Row i that of slot i; a row without tokens the one that it has."""
    told = good_rows(path, Case([2, 0, 1], [0, 1, 2]))
    del told["ssm_state_indices"]
    told["initial_state"] = before = told["initial_state"][:3].clone()
    want, new = fused_recurrent_gated_delta_rule(**(told | {"inplace_final_state": False}))
    assert new is not None and torch.equal(new[1], before[1]) and not new.isnan().any()
    final, behind = lie_apart(torch.full_like(before, torch.nan))
    got, same = fused_recurrent_gated_delta_rule(**told, final_state=final)
    assert same is final and torch.equal(final[1], before[1]) and bool((behind == 255).all())
    assert_close("o", got, want, path.dtype)
    assert_close("final", final, new, torch.float32)
    _, fresh = fused_recurrent_gated_delta_rule(**(told | {"initial_state": None}), final_state=final)
    assert fresh is final and not final[1].any() and final[0].any()

    tokens, told = mamba.make_call(mamba.Case([2, 0, 1]), path)
    state = normal(3, 2, 8, 16).to(path.device)
    want, before, final = field_moves_of_rows(tokens, state), state.clone(), torch.full_like(state, torch.nan)
    selective_state_update(state, **told, final_state=final)
    assert_close("final", final, want, torch.float32)
    assert torch.equal(state, before) and torch.equal(final[1], before[1])


def field_moves_of_rows(tokens: Any, state: Tensor) -> Tensor:
    """Return the states after rows of two, no and one token."""
    final = state.cpu().clone()
    field_moves(tokens, [0, 2, 2, 3], state.cpu(), [0, 1, 2], final, [[0], [1], [2]], each=False)
    return final


def test_states_of_sequences_are_read_where_they_lie(path: Path) -> None:
    """And of no dtype are they rounded before what is computed from them."""
    for dtype in (torch.float32, HALF):
        told = good_chunk(path, Case([3, 0, 70], states=dtype))
        packed = told["initial_state"]
        wide, behind = lie_apart(packed)
        kept = bits(wide)
        want, got = (
            chunk_gated_delta_rule(**(told | {"initial_state": states}), output_final_state=True)
            for states in (packed.float(), wide)
        )
        assert got[1] is not None and want[1] is not None
        assert_close("o", got[0], want[0], torch.float32)
        assert_close("final", got[1], want[1], torch.float32)
        assert torch.equal(got[1][1], wide[1].float()) and torch.equal(bits(wide), kept) and bool((behind == 255).all())


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_scan_leaves_states_in_a_pool_that_lies_apart(path: Path, dtype: torch.dtype) -> None:
    """Those that are overwritten may be those that it begins with."""
    H, P, S, T = 2, 8, 16, 73
    x, z = normal(2, T, H, P).to(path.device, path.dtype)
    B, C = normal(2, T, 1, S, seed=1).to(path.device, path.dtype)
    dt, A = normal(T, H, seed=2).to(path.device, path.dtype), -normal(H).abs().to(path.device)
    starts, slots = ints([0, 3, 3, T], path.device), ints([2, 4, 0], path.device)
    told: dict[str, Any] = {"dt_softplus": True, "z": z}
    states = normal(5, H, P, S, seed=3).to(path.device, dtype)
    pool, behind = lie_apart(states)

    def scan(**more: Any) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(x)
        return out, mamba_chunk_scan_combined_varlen(x, dt, A, B, C, 64, starts, None, None, None, out, **told, **more)

    want, final = scan(initial_states=states[1:4].float(), state_dtype=torch.float32)
    got, nothing = scan(initial_states=pool[1:4], final_states_out=pool, final_state_indices=slots)
    assert nothing is None and final is not None
    assert_close("out", got, want, torch.float32 if path.dtype == torch.float32 else path.dtype)
    assert_close("states", pool[[2, 4, 0]], final, dtype)
    assert torch.equal(pool[4], states[2]) and torch.equal(pool[[1, 3]], states[[1, 3]]) and bool((behind == 255).all())


def test_a_table_leaves_outputs_as_they_are_without_it(exact_path: Path) -> None:
    """To about 1e-7, of eight tokens and states of 16 bits: what goes on from token to token is not rounded."""
    device = exact_path.device
    for dtype in (BF16, HALF):
        case = Case([8], [[*range(8)]], [1], dense=True, states=dtype)
        told = good_rows(exact_path, case)
        plain = told | {"initial_state": told["initial_state"].clone(), "ssm_state_indices": ints([0], device)}
        del plain["num_accepted_tokens"]
        want, got = (fused_recurrent_gated_delta_rule(**x)[0].double() for x in (plain, told))
        assert float((got - want).norm() / want.norm()) < 3e-7
        assert_close("state", told["initial_state"][7], plain["initial_state"][0], dtype)


@pytest.mark.parametrize("each", [False, True], ids=["slots", "table"])
def test_a_slot_that_pads_keeps_nothing(path: Path, each: bool) -> None:
    """vLLM's is 0: a row that goes there is computed, one that begins there is skipped."""
    move = Move([2, 1, 2], [4, 3, 0], [0, 5, 6])
    if each:
        move = Move([2, 1, 2], [[4], [3], [0]], [[0, 7], [5, 0], [6, 8]], [1, 1, 1])
    pads = {0: -1}
    told = replace(move, slots=[[4], [3], [-1]] if each else [4, 3, -1])
    told = replace(told, targets=[[pads.get(x, x) for x in row] for row in move.kept] if each else [-1, 5, 6])
    tokens, arguments = mamba.make_call(mamba.Case(told.lengths, told.slots), path)
    arguments |= {"state_batch_indices": ints(move.slots, path.device, each), "pad_slot_id": 0}
    if move.accepted is not None:
        arguments["num_accepted_tokens"] = ints(move.accepted, path.device)

    def call(pool: Tensor, _: Tensor, more: dict[str, Any]) -> Tensor:
        assert more.keys() == {"targets"} and move.targets is not None
        targets = ints(move.targets, path.device, each)
        return selective_state_update(pool, **arguments, dst_state_batch_indices=targets)

    check_move(told, tokens, (2, 8, 16), path, call, each=each)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_slots_to_write_are_read_anew_in_a_cuda_graph() -> None:
    path = Path("cuda", BF16)
    row = good_rows(path, Case([2, 1], [4, 1])) | {"output_state_indices": ints([2, 3], "cuda")}
    table = good_rows(path, Case([2, 3], [[4, 1, 7], [2, 5, 0]], [1, 2]))
    table |= {"output_state_indices": ints([[3, 6, 8], [2, 5, 0]], "cuda")}
    table["final_state"] = lie_apart(torch.zeros_like(table["initial_state"], dtype=HALF))[0]

    def run() -> list[Tensor]:
        return [x for told in (row, table) for x in fused_recurrent_gated_delta_rule(**told) if x is not None]

    def change() -> None:
        row["output_state_indices"].copy_(ints([-1, 8], "cuda"))
        table["output_state_indices"].copy_(ints([[0, 1, 2], [3, -1, 4]], "cuda"))

    run()
    with no_waits():
        run()
    check_replay(run, [row["initial_state"], table["final_state"]], change)
