"""The gated delta rule as inference engines call it: `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule` and
`fused_sigmoid_gating_delta_rule_update`.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

Names, arguments and state layout are those of vLLM, and of SGLang for the third; by name, those of fla are taken too.
Value head i uses key head i // (HV / H). Where q has more heads than k and v, HQ and H, head i uses head i // (HQ / H)
of k and v, and HV, the heads of gates, states and outputs, is HQ. Gates, products and sums are fp32, but for the inputs
of chunks (docs/numerics.md). Nothing waits for a GPU: what index tensors say is checked on the CPU alone.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS
from deltaline_kernels.compat.arguments import (
    EngineRows,
    Unused,
    UnusedSteps,
    check_flag,
    check_number,
    check_unused,
)
from deltaline_kernels.compat.delta_inputs import check_beside, check_counts, pack_delta, pack_rates
from deltaline_kernels.compat.recurrence import advance
from deltaline_kernels.compat.slots import Slots, advance_slots, check_contents, check_pool
from deltaline_kernels.gated_delta import run_gated_delta
from deltaline_kernels.gated_delta.inputs import DeltaInputs
from deltaline_kernels.operators import operator

# The softplus that the kernels compute.
SOFTPLUS_BETA, SOFTPLUS_THRESHOLD = 1.0, 20.0


def _fake_outputs(v: Tensor, gate: Tensor) -> Tensor:
    return v.new_empty(*v.shape[:2], gate.shape[-1], v.shape[3])


def _fake_states(k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None, v_first: bool) -> Tensor:
    num_rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = v.new_empty(num_rows, g.shape[2], v.shape[3], k.shape[3], dtype=torch.float32)
    return states if v_first else states.transpose(2, 3)


def _fake_chunks(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    return _fake_outputs(v, g), _fake_states(k, v, g, cu_seqlens, state_v_first) if output_final_state else None


def _fake_steps(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    inplace_final_state: bool,
    cu_seqlens: Tensor | None,
    output_final_state: bool | None,
    state_v_first: bool,
    final_state: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    if output_final_state is not None:
        return _fake_chunks(k, v, g, output_final_state, cu_seqlens, state_v_first)
    if final_state is not None:
        return _fake_outputs(v, g), final_state
    if initial_state is None:
        return _fake_outputs(v, g), _fake_states(k, v, g, cu_seqlens, True)
    return _fake_outputs(v, g), initial_state if inplace_final_state else initial_state.new_empty(initial_state.shape)


def _fake_update(v: Tensor, a: Tensor, **_: Any) -> Tensor:
    return _fake_outputs(v, a)


@operator(_fake_chunks, results=2, unused=check_unused)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    state_v_first: bool = True,
    **unused: Unpack[Unused],
) -> tuple[Tensor, Tensor | None]:
    """Run whole sequences in chunks. Mutates nothing.

    Args:
        q, k: `[batch, tokens, H, K]`; v: `[batch, tokens, HV, V]`, HV a multiple of H; or q `[batch, tokens, HQ, K]`,
            HQ a multiple of the H heads of k and v, which are then copied. fp32, bf16 or fp16; if not all alike, they
            are copied to fp32. Contiguous ones and columns of one tensor are used where they are; one whose heads are
            not packed, or whose tokens are not one distance apart, is copied. Head sizes of at most 256.
        g: `[batch, tokens, HV]`, the log of the decay, at most 0. beta: likewise, of moderate size (0
            to 2, say). Any of the three dtypes; used in fp32.
        scale: of q, above 0; None is K**-0.5.
        initial_state: `[N, HV, V, K]`, any of the three dtypes; None is zero.
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each sequence and the end of the last; the batch is 1
            then. None: each of the batch is a sequence.
        use_qk_l2norm_in_kernel: divide q and k by their norms.
        state_v_first: False: initial and final states are `[N, HV, K, V]`, fla's and transformers' order.
        unused: what other engines pass, and changes nothing (`Unused`).

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no sequence; and `[N, HV, V, K]` fp32 if
        `output_final_state`, else None. The final state of an empty sequence is its initial one.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused)
    check_flag("output_final_state", output_final_state)
    check_flag("state_v_first", state_v_first)
    inputs = pack_delta(q, k, v, {"g": g, "beta": beta}, scale, normalize=use_qk_l2norm_in_kernel)
    rows = _lay_out(v, cu_seqlens)
    return _run_sequences(inputs, v, rows, initial_state, output_final_state, state_v_first, chunked=True)


@operator(_fake_steps, mutates=["initial_state", "final_state"], results=2, unused=check_unused)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    output_final_state: bool | None = None,
    state_v_first: bool = True,
    output_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    **unused: Unpack[Unused],
) -> tuple[Tensor, Tensor | None]:
    """Run the next tokens of each row, one by one.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel: as for `chunk_gated_delta_rule`; a beta of None is
            1. Rows of one token are fastest without cu_seqlens, as `[batch, 1, ...]`.
        initial_state: any of the three dtypes, packed states at any distance; `[N, HV, V, K]`, the state of row i at i,
            None for zero; or with ssm_state_indices a pool `[slots, HV, V, K]`. Mutated if `inplace_final_state` and
            there is no other final_state: the states of rows with tokens, each rounded when it is stored.
        inplace_final_state: False: return new states. Only without ssm_state_indices.
        ssm_state_indices: `(N,)`, the slot of each row, or a table `(N, columns)`: the state after token t of row i
            goes to slot table[i, t]. A row with a negative slot, to begin with or for a token, is skipped: its outputs
            are zero, no slot is touched. So is, on CUDA, a row longer than the table; the CPU refuses it. Slot 0 is an
            ordinary one.
        num_accepted_tokens: `(N,)`, with a table only: row i begins with slot table[i, accepted - 1], counts outside
            1..columns being the nearest of these; None: with table[i, 0]. It and ssm_state_indices may have more rows,
            which are not read.
        output_final_state: True or False, as fla and transformers call it: initial_state and what is returned are those
            of `chunk_gated_delta_rule`, and nothing is mutated. Not beside ssm_state_indices.
        state_v_first: False: states are `[N, HV, K, V]`. Only with output_final_state.
        output_state_indices: as ssm_state_indices, beside it, and of as many dimensions: the slots that states go to,
            in place of those that they come from. A negative one keeps no state.
        final_state: as initial_state, of its dtype or another, and in other memory, unless it is initial_state. Mutated
            in its place, which is only read then. Not beside output_final_state.
        unused: what other engines pass, and changes nothing (`Unused`).

    A row without tokens changes nothing, but that its state, too, goes where states go, if that is elsewhere.

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no row; and final_state, or initial_state, or
        new states in its dtype (fp32 if it is None).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused)
    check_flag("inplace_final_state", inplace_final_state)
    check_flag("state_v_first", state_v_first)
    if output_final_state is not None:
        check_flag("output_final_state", output_final_state)
    gates = {"g": g, "beta": beta}
    inputs = pack_delta(q, k, v, gates, scale, normalize=use_qk_l2norm_in_kernel, optional="beta")
    rows = _lay_out(v, cu_seqlens)
    if output_final_state is not None:
        beside = {
            "ssm_state_indices": ssm_state_indices,
            "num_accepted_tokens": num_accepted_tokens,
            "output_state_indices": output_state_indices,
            "final_state": final_state,
        }
        for name, given in beside.items():
            if given is not None:
                raise ValueError(f"{name}: expected None, as output_final_state is given, got a tensor")
        return _run_sequences(inputs, v, rows, initial_state, output_final_state, state_v_first, chunked=False)
    if not state_v_first:
        raise ValueError("state_v_first: expected True, as output_final_state is not given, got False")
    if ssm_state_indices is not None:
        if not inplace_final_state:
            raise ValueError("inplace_final_state: expected True, as ssm_state_indices is given, got False")
        pool = _check_pool("initial_state", initial_state, inputs)
        final = None if final_state is None else _check_pool("final_state", final_state, inputs)
        names = ("ssm_state_indices", "output_state_indices")
        slots = Slots(names[0], pool, ssm_state_indices, final, output_state_indices, names[1], num_accepted_tokens)
        o = advance_slots(run_gated_delta, inputs, rows, slots, inputs.empty_output(v.dtype))
        return _shape(o, v), pool if final is None else final
    for name, given in (("num_accepted_tokens", num_accepted_tokens), ("output_state_indices", output_state_indices)):
        if given is not None:
            raise ValueError(f"{name}: expected None, as ssm_state_indices is not given, got a tensor")
    for name, given in (("initial_state", initial_state), ("final_state", final_state)):
        if given is not None:
            _check_pool(name, given, inputs, rows.num_rows)
    if q.device.type == "cpu":
        check_contents(rows, inputs.num_tokens)
    if final_state is None:
        is_kept = inplace_final_state and initial_state is not None
        final_state = initial_state if is_kept else _new_states(rows, inputs, initial_state)
    o = inputs.empty_output(v.dtype)
    return _shape(_advance_rows(inputs, rows, initial_state, final_state, o), v), final_state


@operator(_fake_update, mutates=["initial_state_source", "final_state"], unused=partial(check_unused, kind=UnusedSteps))
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    output_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    **unused: Unpack[UnusedSteps],
) -> Tensor:
    """Run the next tokens of each row, one by one, with g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b).

    Args:
        A_log, dt_bias: `(HV,)`, any of the three dtypes.
        a, b: `[batch, tokens, HV]` or `[batch * tokens, HV]`, any of the three dtypes.
        softplus_beta, softplus_threshold: softplus(x) = log(1 + exp(beta x)) / beta, or x where beta x is above the
            threshold. Other ones than 1 and 20 cost a few launches more.
        q, k, v, scale, use_qk_l2norm_in_kernel, cu_seqlens: as for `fused_recurrent_gated_delta_rule`.
        initial_state_source: `[slots, HV, V, K]`, any of the three dtypes, packed states at any distance. Mutated,
            unless there is another final_state: the slots of rows with tokens.
        initial_state_indices: `(N,)`, the slot of each row, perhaps more than N. A row with a negative slot is skipped:
            its outputs are zero, no slot is touched. Slot 0 is an ordinary one.
        output_state_indices, final_state: as for `fused_recurrent_gated_delta_rule`.
        unused: what engines pass, and changes nothing (`UnusedSteps`).

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no row.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedSteps)
    check_number("softplus_beta", softplus_beta, positive=True)
    check_number("softplus_threshold", softplus_threshold)
    gates = {"a": a, "b": b}
    inputs = pack_delta(q, k, v, gates, scale, normalize=use_qk_l2norm_in_kernel, flat_gates=True)
    rates, biases = pack_rates("A_log", A_log, inputs), pack_rates("dt_bias", dt_bias, inputs)
    rows = _lay_out(v, cu_seqlens)
    pool = _check_pool("initial_state_source", initial_state_source, inputs)
    final = None if final_state is None else _check_pool("final_state", final_state, inputs)
    names = ("initial_state_indices", "output_state_indices")
    check_counts(names[0], initial_state_indices, rows.num_rows, inputs.device)
    slots = Slots(names[0], pool, initial_state_indices, final, output_state_indices, names[1])
    if (softplus_beta, softplus_threshold) == (SOFTPLUS_BETA, SOFTPLUS_THRESHOLD):
        inputs = replace(inputs, A_log=rates, dt_bias=biases)
    else:
        rise = F.softplus(inputs.a.float() + biases.float(), softplus_beta, softplus_threshold)
        inputs = replace(inputs, a=-rates.float().exp() * rise, b=inputs.b.float().sigmoid())
    return _shape(advance_slots(run_gated_delta, inputs, rows, slots, inputs.empty_output(v.dtype)), v)


def _run_sequences(
    inputs: DeltaInputs,
    v: Tensor,
    rows: EngineRows,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    *,
    chunked: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check `initial_state`, run the rows from it, and return what `chunk_gated_delta_rule` does. Mutates nothing."""
    if initial_state is not None:
        names = ("HV", "V", "K") if state_v_first else ("HV", "K", "V")
        sizes = _state_sizes(inputs)
        shape = {"N": rows.num_rows, **{name: sizes[name] for name in names}}
        check_beside("initial_state", initial_state, shape, ACTIVATIONS, inputs.device)
        initial_state = initial_state if state_v_first else initial_state.transpose(2, 3)
        if not initial_state[:1].is_contiguous():
            initial_state = initial_state.contiguous()
    if inputs.device.type == "cpu":
        check_contents(rows, inputs.num_tokens)
    final = _new_states(rows, inputs) if output_final_state else None
    o = _advance_rows(inputs, rows, initial_state, final, inputs.empty_output(v.dtype), chunked=chunked)
    return _shape(o, v), final if final is None or state_v_first else final.transpose(2, 3)


def _advance_rows(
    inputs: DeltaInputs,
    rows: EngineRows,
    initial: Tensor | None,
    final: Tensor | None,
    o: Tensor,
    *,
    chunked: bool = False,
) -> Tensor:
    """Run row i from state i of `initial`, None for zero, write its last state to `final` if there is one; return o."""
    moves = final is not None and final is not initial
    rows = replace(rows, history=initial is not None, moves=moves)
    written = final if moves and initial is not None else None
    state = initial if initial is not None else final
    if state is None:
        # Neither read nor written.
        state = torch.empty((0, *_state_sizes(inputs).values()), dtype=torch.float32, device=inputs.device)
    keep = final is not None
    return advance(run_gated_delta, inputs, state, rows, written=written, keep=keep, chunked=chunked, o=o)


def _shape(o: Tensor, v: Tensor) -> Tensor:
    """Return o `[T, HV, V]` as `[batch, tokens, HV, V]`."""
    return o.view(*v.shape[:2], *o.shape[1:])


def _lay_out(v: Tensor, cu_seqlens: Tensor | None) -> EngineRows:
    """Return the rows of the tokens; they have no lines yet."""
    batch, length = v.shape[:2]
    if cu_seqlens is None:
        return EngineRows(batch, length, length, None, None, None, -1, True, None)
    check_counts("cu_seqlens", cu_seqlens, 1, v.device)
    if batch != 1:
        raise ValueError(f"q: expected a batch of 1, as cu_seqlens is given, got {batch}")
    return EngineRows(cu_seqlens.shape[0] - 1, length, 0, cu_seqlens.contiguous(), None, None, -1, True, None)


def _state_sizes(inputs: DeltaInputs) -> dict[str, int]:
    """Return the dimensions of one state."""
    return {"HV": inputs.heads.num_value_heads, "V": inputs.heads.value_dim, "K": inputs.heads.key_dim}


def _new_states(rows: EngineRows, inputs: DeltaInputs, like: Tensor | None = None) -> Tensor:
    """Return room for a state per row, `[N, HV, V, K]`, of the dtype of `like` or fp32."""
    dtype = torch.float32 if like is None else like.dtype
    return torch.empty((rows.num_rows, *_state_sizes(inputs).values()), dtype=dtype, device=inputs.device)


def _check_pool(name: str, pool: Tensor | None, inputs: DeltaInputs, num_lines: int | None = None) -> Tensor:
    """Check states that are read or changed where they lie, and return them."""
    return check_pool(name, pool, {"lines": num_lines, **_state_sizes(inputs)}, inputs.device)
