"""KDA as engines call it, against a plain one. Whatever must not be read is NaN, and must be NaN afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rigs.kernels.draws import ints, normal
from rigs.kernels.field_gated_delta import Tokens, field_gates
from rigs.kernels.field_recurrence import field_rows, field_slots, field_table
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import (
    chunk_kda,
    flash_kda_fwd,
    fused_kda_gate,
    fused_recurrent_kda,
    fused_sigmoid_gating_delta_rule_update,
)

SEQUENCES: Any = {"chunk": chunk_kda, "recurrent": fused_recurrent_kda}
FUNCTIONS = pytest.mark.parametrize("function", SEQUENCES.values(), ids=SEQUENCES)
NUM_SLOTS = 9
FLAGS = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


@dataclass(frozen=True)
class Case:
    """Rows of a call. dense: they are of one length and come as a batch. fresh: there are no states to begin with."""

    lengths: tuple[int, ...]
    dense: bool = False
    fresh: bool = False
    heads: tuple[int, int, int, int] = (1, 2, 16, 8)
    l2norm: bool = True
    scale: float | None = None
    states: torch.dtype = torch.float32

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


CASES = {
    "ragged": Case((3, 40, 1)),
    "fresh": Case((5, 33), fresh=True),
    "empty": Case((0, 3, 0, 2)),
    "no-rows": Case(()),
    "dense": Case((5,) * 3, dense=True),
    "decode": Case((1,) * 3, dense=True),
    "grouped-heads-of-odd-sizes": Case((9, 17), heads=(2, 6, 24, 35)),
    "no-norm-and-a-scale": Case((4, 18), l2norm=False, scale=0.7),
    "states-of-bf16": Case((4, 17), states=torch.bfloat16),
}


@dataclass(frozen=True)
class Call:
    """What a call is given on a device, and the plain rule's view of it."""

    case: Case
    tokens: Tokens
    told: dict[str, Any]
    states: Tensor


def make_call(case: Case, path: Path) -> Call:
    H, HV, K, V = case.heads
    n, num_tokens = len(case.lengths), case.starts[-1]
    q, v = normal(num_tokens, H, K), normal(num_tokens, HV, V, seed=2)
    k = 0.7 * torch.nn.functional.normalize(normal(num_tokens, H, K, seed=1), dim=-1)
    q, k, v = (x.to(path.dtype) for x in (q, k, v))
    g, beta = -normal(num_tokens, HV, K, seed=3).abs(), 2 * normal(num_tokens, HV, seed=4).sigmoid()
    batch = (n, case.lengths[0]) if case.dense else (1, num_tokens)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    told: dict[str, Any] = {name: x.to(path.device).unflatten(0, batch) for name, x in given.items()}
    told |= {"scale": case.scale, "use_qk_l2norm_in_kernel": case.l2norm}
    if not case.dense:
        told["cu_seqlens"] = torch.tensor(case.starts, device=path.device)
    states = torch.zeros(n, HV, V, K) if case.fresh else normal(n, HV, V, K, seed=5).to(case.states)
    return Call(case, Tokens(q, k, v, g, beta, case.scale, case.l2norm), told, states)


def turned(states: Tensor) -> Tensor:
    return states.transpose(2, 3).contiguous()


@FUNCTIONS
@pytest.mark.parametrize("v_first", [False, True], ids=["fla", "v-first"])
@pytest.mark.parametrize("name", CASES)
def test_sequences_match_the_plain_rule(path: Path, name: str, v_first: bool, function: Any) -> None:
    call = make_call(CASES[name], path)
    want, after = field_rows(call.tokens, call.case.starts, call.states)
    initial = None if call.case.fresh else (call.states if v_first else turned(call.states)).to(path.device)
    kept = None if initial is None else initial.clone()
    told = call.told | ({"state_v_first": True} if v_first else {})
    o, final = function(**told, initial_state=initial, output_final_state=True)
    assert o.dtype == path.dtype and final.dtype == torch.float32
    assert_close("o", o.flatten(0, 1), want, path.dtype)
    assert_close("final_state", final if v_first else final.transpose(2, 3), after, path.dtype)
    given: dict[str, Any] = {"chunk_size": 32} if function is chunk_kda else {"inplace_final_state": False}
    again, none = function(**told, initial_state=initial, **given)
    assert none is None and torch.equal(again, o)
    assert initial is None or (kept is not None and torch.equal(initial, kept))


@pytest.mark.parametrize("v_first", [False, True], ids=["fla", "v-first"])
@pytest.mark.parametrize(
    "case",
    [Case((3, 130, 0, 64, 65)), Case((70, 1), fresh=True), Case((130,) * 2, dense=True), Case(())],
    ids=["ragged", "fresh", "dense", "no-rows"],
)
def test_chunks_return_the_states_before_each(path: Path, case: Case, v_first: bool) -> None:
    call = make_call(case, path)
    befores = [
        field_rows(call.tokens, [begin, begin + done], call.states[i : i + 1])[1]
        for i, begin in enumerate(case.starts[:-1])
        for done in range(0, case.lengths[i], 64)
    ]
    want = torch.cat(befores) if befores else call.states
    initial = None if case.fresh else (call.states if v_first else turned(call.states)).to(path.device)
    told = call.told | {"state_v_first": v_first, "initial_state": initial}
    o, final = chunk_kda(**told, output_final_state=True)
    for wants_final in (True, False):
        got, last, states = chunk_kda(**told, output_final_state=wants_final, return_intermediate_states=True)
        assert states.dtype == call.told["k"].dtype and states.shape[0] == got.shape[0]
        states = states.flatten(0, 1)
        assert_close("states", states if v_first else states.transpose(2, 3), want, path.dtype)
        assert_close("o", got, o, path.dtype)
        assert last is None if not wants_final else torch.equal(last, final)


@FUNCTIONS
@pytest.mark.parametrize(
    "given", ["both", "of-a-layer", "no-rates", "no-biases", "gate-alone", "beta-alone", "doubled"]
)
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_gates_in_the_kernel_match_the_plain_ones(
    path: Path, given: str, lower_bound: float | None, function: Any
) -> None:
    if given == "no-rates" and lower_bound is None:
        lower_bound = -1.5
    call = make_call(Case((7, 20)), path)
    _, HV, K, _ = call.case.heads
    raw, logits = 3 * normal(27, HV, K, seed=6).to(path.dtype), normal(27, HV, seed=7).to(path.dtype)
    rates, biases = normal(HV, seed=8), normal(HV * K, seed=9)
    rates = torch.zeros(HV) if given == "no-rates" else rates
    biases = torch.zeros(HV * K) if given == "no-biases" else biases
    g, beta = plain_gates(raw, rates, biases, logits, lower_bound)
    told = dict(call.told)
    if given != "beta-alone":
        told |= {"use_gate_in_kernel": True, "g": raw[None].to(path.device), "lower_bound": lower_bound}
        told["A_log"] = None if given == "no-rates" else rates.to(path.device)
        told["dt_bias"] = None if given == "no-biases" else biases.to(path.device)
    if given == "of-a-layer":  # as fla's and Kimi Linear's keep them
        told |= {"A_log": told["A_log"].view(1, 1, HV, 1), "dt_bias": told["dt_bias"].view(1, 1, HV, K)}
    if given != "gate-alone":
        told |= {"use_beta_sigmoid_in_kernel": True, "beta": logits[None].to(path.device)}
    if given == "doubled":
        told["allow_neg_eigval"] = True
        beta = 2 * beta
    tokens = replace(
        call.tokens,
        g=call.tokens.g if given == "beta-alone" else g,
        beta=call.tokens.beta if given == "gate-alone" else beta,
    )
    want, after = field_rows(tokens, call.case.starts, call.states)
    o, final = function(**told, initial_state=turned(call.states).to(path.device), output_final_state=True)
    assert_close("o", o[0], want, path.dtype)
    assert_close("final_state", final.transpose(2, 3), after, path.dtype)


@pytest.mark.parametrize("slots", [[4, 0, 7], [4, -1, 7]], ids=["slots", "a-skipped-row"])
def test_next_tokens_of_slots_match_the_plain_rule(path: Path, slots: list[int]) -> None:
    """As vLLM calls it: a pool, V first, mutated."""
    call = make_call(Case((2, 1, 3)), path)
    want, pool = make_pool(path, call.case, [slot for slot in slots if slot >= 0])
    o = field_slots(call.tokens, call.case.starts, want, slots)
    told = call.told | {"state_v_first": True, "ssm_state_indices": ints(*slots).to(path.device)}
    got, final = fused_recurrent_kda(**told, initial_state=pool, inplace_final_state=True)
    assert final is pool
    assert_close("o", got[0], o, path.dtype)
    assert_close("pool", pool, want, torch.float32)


def test_next_tokens_of_a_table_match_the_plain_rule(path: Path) -> None:
    call = make_call(Case((3, 2)), path)
    slots, accepted = [[4, 1, 7], [2, 5, 0]], [1, 3]
    want, pool = make_pool(path, call.case, [4, 0])
    o = field_table(call.tokens, call.case.starts, want, slots, accepted)
    told = call.told | {"state_v_first": True, "ssm_state_indices": torch.tensor(slots, device=path.device)}
    got, _ = fused_recurrent_kda(
        **told, initial_state=pool, num_accepted_tokens=torch.tensor(accepted, device=path.device)
    )
    assert_close("o", got[0], o, path.dtype)
    assert_close("pool", pool, want, torch.float32)


@pytest.mark.parametrize("shape", ["joined", "flat", "by-head", "of-a-layer"])
@pytest.mark.parametrize(
    ("softplus", "lower_bound"),
    [((1.0, 20.0), None), ((1.0, 20.0), -5.0), ((2.0, 1.5), None)],
    ids=["softplus", "bounded", "another-softplus"],
)
def test_sigmoid_update_of_kda_matches_the_plain_rule(
    path: Path, softplus: tuple[float, float], lower_bound: float | None, shape: str
) -> None:
    """As SGLang calls it. A batch of several rows of one token, and of one row of several."""
    for lengths in ((1, 1, 1), (3,)):
        case = Case(lengths, dense=True)
        call = make_call(case, path)
        _, HV, K, _ = case.heads
        batch, slots = (len(lengths), lengths[0]), [4, 0, 7][: len(lengths)]
        a, b = normal(3, HV, K, seed=6).to(path.dtype), normal(3, HV, seed=7).to(path.dtype)
        rates, biases = normal(HV, seed=8), normal(HV * K, seed=9)
        g, beta = plain_gates(a, rates, biases, b, lower_bound, softplus)
        want, pool = make_pool(path, case, slots)
        o = field_slots(replace(call.tokens, g=g, beta=beta), case.starts, want, slots)
        by_head = a.unflatten(0, batch)
        given = {"joined": by_head.flatten(2), "flat": a.flatten(1), "by-head": by_head, "of-a-layer": by_head}
        rates_of = {"of-a-layer": rates.view(1, 1, HV, 1)}
        biases_of = {"by-head": biases.view(HV, K), "of-a-layer": biases.view(1, 1, HV, K)}
        tokens = {name: call.told[name] for name in ("q", "k", "v", "scale", "use_qk_l2norm_in_kernel")}
        got = fused_sigmoid_gating_delta_rule_update(
            A_log=rates_of.get(shape, rates).to(path.device),
            a=given[shape].to(path.device),
            dt_bias=biases_of.get(shape, biases).to(path.device),
            softplus_beta=softplus[0],
            softplus_threshold=softplus[1],
            b=(b if shape == "flat" else b.unflatten(0, batch)).to(path.device),
            initial_state_source=pool,
            initial_state_indices=ints(*slots).to(path.device),
            is_kda=True,
            lower_bound=lower_bound,
            **tokens,
        )
        assert_close("o", got.flatten(0, 1), o, path.dtype)
        assert_close("pool", pool, want, torch.float32)


@pytest.mark.parametrize("kept", ["states", "in-place", "no-final", "no-initial", "no-states"])
@pytest.mark.parametrize("dense", [False, True], ids=["offsets", "batch"])
def test_flash_matches_the_plain_rule(path: Path, kept: str, dense: bool) -> None:
    fresh = kept in ("no-initial", "no-states")
    case = Case((20, 20) if dense else (3, 0, 36), dense=dense, heads=(2, 2, 16, 16), fresh=fresh)
    call, told = make_call(case, path), flash_arguments(case, path)
    initial = None if case.fresh else call.states.clone().to(path.device)
    final = initial if kept == "in-place" else None
    if kept in ("states", "no-initial"):
        final = torch.full(call.states.shape, torch.nan, device=path.device)
    flash_kda_fwd(**told, initial_state=initial, final_state=final)
    raw, rates, biases, logits = (told[name].cpu() for name in ("g", "A_log", "dt_bias", "beta"))
    g, beta = plain_gates(raw.flatten(0, 1), rates, biases, logits.flatten(0, 1), -5.0)
    want, after = field_rows(replace(call.tokens, g=g, beta=beta), case.starts, call.states)
    assert_close("out", told["out"].flatten(0, 1), want, path.dtype)
    if final is not None:
        assert_close("final_state", final, after, path.dtype)
    elif initial is not None:
        assert torch.equal(initial.cpu(), call.states)


@pytest.mark.parametrize(("heads", "name"), [((4, 2), "q"), ((1, 2), "q"), ((2, 4), "q")])
def test_flash_writes_nothing_behind_its_output(path: Path, heads: tuple[int, int], name: str) -> None:
    """Of more heads of q than of k and v, or of less, it says so and touches nothing."""
    told = flash_arguments(Case((5,), heads=(2, 2, 16, 16)), path)
    room = torch.full((5 * 2 * 16 + 512,), 7.0, dtype=path.dtype, device=path.device)
    q_heads, heads_of_v = heads
    for which, count in (("q", q_heads), ("k", min(heads)), ("v", heads_of_v)):
        told[which] = normal(1, 5, count, 16).to(path.device, path.dtype)
    told["out"] = room[: 5 * heads_of_v * 16].view(1, 5, heads_of_v, 16)
    told["g"] = normal(1, 5, max(heads), 16).to(path.device, path.dtype)
    told["beta"] = normal(1, 5, max(heads)).to(path.device, path.dtype)
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        flash_kda_fwd(**told)
    assert (room == 7).all()


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_gate_matches_the_plain_one(path: Path, lower_bound: float | None, out: torch.dtype) -> None:
    g = 4 * normal(2, 5, 3, 24).to(path.dtype)
    rates, biases = normal(3, seed=1), normal(72, seed=2)
    want, _ = plain_gates(g.flatten(0, 1), rates, biases, torch.zeros(10, 3), lower_bound)
    got = fused_kda_gate(g.to(path.device), rates.to(path.device), biases.to(path.device), lower_bound, out)
    assert got.dtype == out and got.shape == g.shape
    assert_close("g", got.flatten(0, 1), want, out)
    bare, _ = plain_gates(g.flatten(0, 1), torch.zeros(3), torch.zeros(72), torch.zeros(10, 3), lower_bound)
    assert_close("g", fused_kda_gate(g.to(path.device), lower_bound=lower_bound).flatten(0, 1), bare, torch.float32)


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "q: expected at most the 2 heads of v, got 4", {"q": normal(1, 4, 4, 16)}),
    (ValueError, r"g: expected shape .batch=1, tokens=4, HV=2, K=16.", {"g": normal(1, 4, 2)}),
    (ValueError, r"beta: expected shape .batch=1, tokens=4, HV=2.", {"beta": normal(1, 4, 2, 1)}),
    (ValueError, r"initial_state: expected shape .N=1, HV=2, K=16, V=8.", {"initial_state": normal(1, 2, 8, 16)}),
    (TypeError, "A_log: expected a tensor, as lower_bound is None", FLAGS | {"A_log": None}),
    (ValueError, r"A_log: expected 2 values, got shape .3,.", FLAGS | {"A_log": normal(3)}),
    (ValueError, r"dt_bias: expected 32 values, got shape .2,.", FLAGS | {"A_log": normal(2), "dt_bias": normal(2)}),
    (ValueError, "lower_bound: expected a finite number of at most 0", FLAGS | {"lower_bound": 5.0}),
    (TypeError, "lower_bound: expected a number", FLAGS | {"lower_bound": "low"}),
    (ValueError, "allow_neg_eigval: expected False, as use_beta_sigmoid", {"allow_neg_eigval": True}),
    (TypeError, "use_gate_in_kernel: expected True or False", {"use_gate_in_kernel": 1, "lower_bound": -1.0}),
    (TypeError, "state_v_first: expected True or False", {"state_v_first": None}),
    (TypeError, "transpose_state: expected no argument of this name", {"transpose_state": True}),
    (ValueError, "cp_context: expected None, the only", {"cp_context": 1}),
]


@FUNCTIONS
@pytest.mark.parametrize(("error", "message", "change"), WRONG, ids=[message for _, message, _ in WRONG])
def test_the_wrong_argument_of_kda_is_named(
    function: Any, error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    call = make_call(Case((4,)), Path("cpu", torch.float32))
    function(**call.told)
    with pytest.raises(error, match="^" + message):
        function(**(call.told | change))


def test_what_belongs_together_is_asked_for() -> None:
    call = make_call(Case((4,)), Path("cpu", torch.float32))
    flags: Any = FLAGS
    for message, change in (
        ("lower_bound: expected a number, as safe_gate", flags | {"safe_gate": True, "A_log": normal(2)}),
        ("chunk_size: expected 64, as return_int", {"return_intermediate_states": True, "chunk_size": 32}),
        ("`chunk_size` must be either 32 or 64, got 16", {"chunk_size": 16}),
        ("`chunk_size` must be either 32 or 64, got None", {"chunk_size": None}),
    ):
        with pytest.raises(ValueError, match="^" + message):
            chunk_kda(**(call.told | change))
    pool: Any = {"initial_state": normal(9, 2, 8, 16), "ssm_state_indices": ints(1)}
    for message, change in (
        ("state_v_first: expected True, as ssm_state_indices", pool),
        ("output_final_state: expected False", pool | {"state_v_first": True, "output_final_state": True}),
        ("num_accepted_tokens: expected None, as ssm", {"num_accepted_tokens": ints(1)}),
        ("inplace_final_state: expected False, as ssm_state_indices is not given, got", {"inplace_final_state": True}),
        ("inplace_final_state: expected True, as ssm_state_indices is given", pool | {"inplace_final_state": False}),
    ):
        with pytest.raises(ValueError, match="^" + message):
            fused_recurrent_kda(**(call.told | change))


def test_calls_of_transformers_are_taken() -> None:
    """With what the model's call passes on."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    call = make_call(Case((70,), dense=True, heads=(2, 2, 16, 16)), Path("cpu", torch.float32))
    tokens = [call.told[name] for name in "qkv"]
    told = {"g": call.told["g"], "beta": call.told["beta"], "initial_state": turned(call.states)}
    told |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for ours, theirs in (
        (chunk_kda, modeling.chunk_kimi_delta_attention),
        (fused_recurrent_kda, modeling.recurrent_kimi_delta_attention),
    ):
        for got, want in zip(ours(*tokens, **told, use_cache=True), theirs(*tokens, **told), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def plain_gates(
    raw: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    logits: Tensor,
    lower_bound: float | None,
    softplus: tuple[float, float] = (1.0, 20.0),
) -> tuple[Tensor, Tensor]:
    """Return log decays and strengths of raw `[T, HV, K]`, A_log `[HV]`, dt_bias of HV * K values and logits."""
    heads, biases = A_log[:, None].expand(raw.shape[1:]), dt_bias.reshape(raw.shape[1:])
    g, _ = field_gates(heads, raw, biases, torch.zeros(()), *softplus)
    if lower_bound is not None:
        g = lower_bound / (1.0 + torch.exp(-torch.exp(heads.double()) * (raw.double() + biases.double())))
    return g, 1.0 / (1.0 + torch.exp(-logits.double()))


def make_pool(path: Path, case: Case, used: list[int]) -> tuple[Tensor, Tensor]:
    """Return states of slots that are NaN but where they are used, on the host and on the device."""
    _, HV, K, V = case.heads
    states = torch.full((NUM_SLOTS, HV, V, K), torch.nan)
    for slot in used:
        states[slot] = normal(HV, V, K, seed=10 + slot)
    return states, states.clone().to(path.device)


def flash_arguments(case: Case, path: Path) -> dict[str, Any]:
    """Return arguments of `flash_kda_fwd` but for the states; its output is NaN."""
    call = make_call(case, path)
    _, HV, K, _ = case.heads
    told = {name: x for name, x in call.told.items() if name != "use_qk_l2norm_in_kernel"}
    told |= {"g": 2 * told["g"].to(path.dtype), "beta": told["beta"].to(path.dtype), "scale": K**-0.5}
    told |= {"A_log": normal(HV, seed=8).to(path.device), "dt_bias": normal(HV, K, seed=9).to(path.device)}
    return told | {"lower_bound": -5.0, "out": torch.full_like(told["v"], torch.nan)}
