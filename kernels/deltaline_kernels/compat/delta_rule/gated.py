"""The gated delta rule as inference engines call it: `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule`.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

Names, arguments and state layout are those of vLLM; by name, those of fla are taken too.
Value head i uses key head i // (HV / H). Where q has more heads than k and v, HQ and H, head i uses head i // (HQ / H)
of k and v, and HV, the heads of gates, states and outputs, is HQ. Gates, products and sums are fp32, but for the inputs
of chunks (docs/numerics.md). Nothing waits for a GPU: what index tensors say is checked on the CPU alone.
"""

from functools import partial
from types import NoneType
from typing import Any, Unpack

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import (
    Unused,
    UnusedRows,
    check_flag,
    check_is,
    check_operand,
    check_unused,
    describe,
)
from deltaline_kernels.compat.delta_inputs import narrow, pack_delta
from deltaline_kernels.compat.delta_rule.raw_gates import parse_gate, with_gates
from deltaline_kernels.compat.delta_rule.sequences import (
    advance_rows,
    check_states,
    lay_out,
    new_output,
    new_states,
    parse_order,
    run_pool,
    run_rule,
    run_sequences,
    shape_output,
)
from deltaline_kernels.compat.slots import Slots, advance_slots
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.operators import operator


def _fake_outputs(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(*v.shape[:2], torch.sym_max(q.shape[2], v.shape[2]), v.shape[3])


def _fake_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, v_first: bool) -> Tensor:
    num_rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size = (num_rows, torch.sym_max(q.shape[2], v.shape[2]), v.shape[3], q.shape[3])
    states = v.new_empty(size, dtype=torch.float32)
    return states if v_first else states.transpose(2, 3)


def _fake_sequences(
    q: Tensor,
    v: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool | None,
    transpose_state_layout: bool | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    v_first = state_v_first is not False if transpose_state_layout is None else transpose_state_layout
    return _fake_outputs(q, v), _fake_states(q, v, cu_seqlens, v_first) if output_final_state else None


def _fake_steps(
    q: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    inplace_final_state: bool,
    cu_seqlens: Tensor | None,
    output_final_state: bool | None,
    state_v_first: bool | None,
    transpose_state_layout: bool | None,
    final_state: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    if output_final_state is not None:
        return _fake_sequences(q, v, output_final_state, cu_seqlens, state_v_first, transpose_state_layout)
    if final_state is not None:
        return _fake_outputs(q, v), final_state
    if initial_state is None:
        return _fake_outputs(q, v), _fake_states(q, v, cu_seqlens, True)
    return _fake_outputs(q, v), initial_state if inplace_final_state else initial_state.new_empty(initial_state.shape)


_check_rows = partial(check_unused, kind=UnusedRows)


# With a pool it would mutate initial_state: to a graph each of its calls would then, also those of expanded states.
@operator(
    _fake_sequences, results=2, only={"core_attn_out": NoneType, "initial_state_indices": NoneType}, unused=check_unused
)
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
    state_v_first: bool | None = None,
    use_gate_in_kernel: bool | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool | None = None,
    chunk_size: int = 64,
    initial_state_indices: Tensor | None = None,
    inplace_update: bool | None = None,
    core_attn_out: Tensor | None = None,
    **unused: Unpack[Unused],
) -> tuple[Any, ...]:
    """Run whole sequences in chunks. Mutates core_attn_out, and initial_state beside initial_state_indices.

    Args:
        q, k: `[batch, tokens, H, K]`; v: `[batch, tokens, HV, V]`, HV a multiple of H; or q `[batch, tokens, HQ, K]`,
            HQ a multiple of the H heads of k and v, which are then copied. fp32, bf16 or fp16; if not all alike, they
            are copied to fp32. Contiguous ones and columns of one tensor are used where they are; one whose heads are
            not packed, or whose tokens are not one distance apart, is copied. Head sizes of at most 256.
        g: `[batch, tokens, HV]`, the log of the decay, at most 0. beta: likewise, of moderate size (0
            to 2, say). Any of the three dtypes; used in fp32.
        scale: of q, above 0; None is K**-0.5.
        initial_state: `[N, HV, V, K]`, any of the three dtypes; None is zero. Beside initial_state_indices a pool
            `[slots, HV, V, K]` of packed states at any distance.
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each sequence and the end of the last; the batch is 1
            then. None: each of the batch is a sequence.
        use_qk_l2norm_in_kernel: divide q and k by their norms.
        state_v_first: None is True; False: initial and final states are `[N, HV, K, V]`, fla's and transformers' order.
            transpose_state_layout, its older name, counts in its place, with a DeprecationWarning, and not beside True.
        use_gate_in_kernel: the log of the decay is -exp(A_log) softplus(g + dt_bias), with A_log and dt_bias `(HV,)`,
            any of the three dtypes, a dt_bias of None being zero. False: they say nothing. None: they are not there.
        use_beta_sigmoid_in_kernel: the strength is sigmoid(beta), with allow_neg_eigval twice that.
        chunk_size: 16, 32 or 64, and changes nothing, as `unused`: what other engines pass (`Unused`).
        initial_state_indices: `(N,)`, the slot of each sequence, perhaps more than N, as SGLang has it: final states go
            to the pool, each rounded when it is stored, but with inplace_update=False. A sequence with a negative slot
            is skipped: its outputs are zero, no slot is touched. Not beside output_final_state.
        core_attn_out: `[tokens, HV, V]` or `[batch, tokens, HV, V]`, contiguous, in v's dtype: the memory of o.

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no sequence; and `[N, HV, V, K]` fp32 if
        `output_final_state`, else None. The final state of an empty sequence is its initial one. Beside
        initial_state_indices o, None, and `[batch, chunks, HV, V, K]` in k's dtype, the state before each chunk of 64
        tokens or of a sequence's last ones, zero for skipped ones; with cu_seqlens those of one sequence behind those
        of the other, and the host waits for the GPU to know how many.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"`chunk_size` must be 16, 32, or 64, got {describe(chunk_size)}")
    check_flag("output_final_state", output_final_state)
    v_first = parse_order(state_v_first, transpose_state_layout)
    inputs = pack_delta(q, k, v, {"g": g, "beta": beta}, scale, normalize=use_qk_l2norm_in_kernel)
    gate = parse_gate(use_gate_in_kernel, A_log, dt_bias)
    inputs = with_gates(inputs, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rows = lay_out(v, cu_seqlens)
    o = None if core_attn_out is None else _take_room(core_attn_out, inputs, v)
    if inplace_update is not None:
        check_flag("inplace_update", inplace_update)
    if initial_state_indices is None:
        check_is(None, "as initial_state_indices is not given", inplace_update=inplace_update)
        return run_sequences(inputs, v, rows, initial_state, output_final_state, v_first, chunked=True, o=o)
    given = "as initial_state_indices is given"
    check_is(False, given, output_final_state=output_final_state)
    check_is(True, given, state_v_first=v_first)
    keep = inplace_update is not False
    o, states = run_pool(inputs, v, rows, initial_state, initial_state_indices, keep=keep, between=k.dtype, o=o)
    return o, None, states


def _take_room(room: Tensor, inputs: DeltaInputs, v: Tensor) -> Tensor:
    """Check and return the caller's room for outputs as `[T, HV, V]`."""
    batch, length = v.shape[:2]
    tokens = {"batch": batch, "tokens": length} if getattr(room, "ndim", 0) == 4 else {"tokens": batch * length}
    heads = {"HV": inputs.heads.num_value_heads, "V": inputs.heads.value_dim}
    check_operand("core_attn_out", room, tokens | heads, (v.dtype,), v.device, beside="v", contiguous=True)
    return room.view(batch * length, *heads.values())


@operator(_fake_steps, mutates=["initial_state", "final_state"], results=2, unused=_check_rows)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
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
    state_v_first: bool | None = None,
    output_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    use_gate_in_kernel: bool | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    transpose_state_layout: bool | None = None,
    **unused: Unpack[UnusedRows],
) -> tuple[Tensor, Tensor | None]:
    """Run the next tokens of each row, one by one.

    Args:
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
            use_beta_sigmoid_in_kernel, allow_neg_eigval: as for `chunk_gated_delta_rule`; without a g nothing decays,
            and a beta of None is 1. Tensors of fp64, too, are taken, and used in fp32. Rows of one token are fastest
            without cu_seqlens, as `[batch, 1, ...]`.
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
            of `chunk_gated_delta_rule`, or of fp64, and nothing is mutated. Not beside ssm_state_indices.
        state_v_first, transpose_state_layout: likewise; `[N, HV, K, V]` only with output_final_state.
        output_state_indices: as ssm_state_indices, beside it, and of as many dimensions: the slots that states go to,
            in place of those that they come from. A negative one keeps no state.
        final_state: as initial_state, of its dtype or another, and in other memory, unless it is initial_state. Mutated
            in its place, which is only read then. Not beside output_final_state.
        unused: what other engines pass, and changes nothing (`UnusedRows`).

    A row without tokens changes nothing, but that its state, too, goes where states go, if that is elsewhere.

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no row; and final_state, or initial_state, or
        new states in its dtype (fp32 if it is None).

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check_rows(unused)
    check_flag("inplace_final_state", inplace_final_state)
    v_first = parse_order(state_v_first, transpose_state_layout)
    if output_final_state is not None:
        check_flag("output_final_state", output_final_state)
    gate = parse_gate(use_gate_in_kernel, narrow(A_log), narrow(dt_bias))
    if gate is not None and g is None:
        raise TypeError("g: expected a tensor, as use_gate_in_kernel is True, got NoneType")
    tokens, gates = (narrow(q), narrow(k), narrow(v)), {"g": narrow(g), "beta": narrow(beta)}
    optional = {"g": 0.0, "beta": 1.0}
    inputs = pack_delta(*tokens, gates, scale, normalize=use_qk_l2norm_in_kernel, optional=optional)
    inputs = with_gates(inputs, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rows = lay_out(v, cu_seqlens)
    if output_final_state is not None:
        given = "as output_final_state is given"
        check_is(None, given, ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens)
        check_is(None, given, output_state_indices=output_state_indices, final_state=final_state)
        return run_sequences(inputs, v, rows, narrow(initial_state), output_final_state, v_first, chunked=False)
    check_is(True, "as output_final_state is not given", state_v_first=v_first)
    if ssm_state_indices is not None:
        check_is(True, "as ssm_state_indices is given", inplace_final_state=inplace_final_state)
        pool = check_states("initial_state", initial_state, inputs)
        final = None if final_state is None else check_states("final_state", final_state, inputs)
        names = ("ssm_state_indices", "output_state_indices")
        slots = Slots(names[0], pool, ssm_state_indices, final, output_state_indices, names[1], num_accepted_tokens)
        o = advance_slots(run_rule, inputs, rows, slots, new_output(inputs, v))
        return shape_output(o, v), pool if final is None else final
    without = "as ssm_state_indices is not given"
    check_is(None, without, num_accepted_tokens=num_accepted_tokens, output_state_indices=output_state_indices)
    for name, states in (("initial_state", initial_state), ("final_state", final_state)):
        if states is not None:
            check_states(name, states, inputs, rows.num_rows)
    if final_state is None:
        is_kept = inplace_final_state and initial_state is not None
        final_state = initial_state if is_kept else new_states(rows, inputs, initial_state)
    o = advance_rows(inputs, rows, initial_state, final_state, new_output(inputs, v))
    return shape_output(o, v), final_state
