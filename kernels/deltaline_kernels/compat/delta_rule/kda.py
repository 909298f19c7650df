"""KDA as fla and FlashKDA call it: `chunk_kda`, `fused_recurrent_kda` and `flash_kda_fwd`.

    h = exp(g) h;  u = beta (v - h k);  h += u k^T;  o = h q

with a g of each key channel. Names, arguments, defaults and state layout are fla's; with `state_v_first` states are
those of vLLM and SGLang. Value head i uses key head i // (HV / H). Gates, products and sums are fp32, but for the
inputs of chunks (docs/numerics.md). Nothing waits for a GPU but where it is told: what index tensors say is checked on
the CPU alone.
"""

from functools import partial
from types import NoneType
from typing import Any, Unpack

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import (
    UnusedKda,
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
    fake_states_before,
    lay_out,
    new_output,
    parse_order,
    run_pool,
    run_rule,
    run_sequences,
    shape_output,
)
from deltaline_kernels.compat.slots import Slots, advance_slots
from deltaline_kernels.operators import operator
from deltaline_kernels.rows import WAYPOINT_TOKENS


def _fake_sequences(
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    transpose_state_layout: bool | None,
    ssm_state_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    o = v.new_empty(v.shape)
    if ssm_state_indices is not None:
        return o, initial_state
    if not output_final_state:
        return o, None
    num_rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = v.new_empty(num_rows, v.shape[2], v.shape[3], k.shape[3], dtype=torch.float32)
    return o, states if state_v_first or transpose_state_layout else states.transpose(2, 3)


def _fake_chunks(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, **told: Any) -> Any:
    found = _fake_sequences(k, v, cu_seqlens=cu_seqlens, **told)
    if not told["return_intermediate_states"]:
        return found
    states = fake_states_before(k, v, v.shape[2], cu_seqlens)
    v_first = told["state_v_first"] or told["transpose_state_layout"]
    return *found, states if v_first else states.transpose(3, 4)


def _fake_nothing(**_: Any) -> None:
    return None


_check_chunks, _check_rows = (partial(check_unused, kind=kind) for kind in (UnusedKda, UnusedRows))


# With a pool it would mutate initial_state: to a graph each of its calls would then, also those of expanded states.
@operator(_fake_chunks, results=3, only={"initial_state_indices": NoneType}, unused=_check_chunks)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    chunk_size: int = WAYPOINT_TOKENS,
    initial_state_indices: Tensor | None = None,
    output_intermediate_states: bool = False,
    beta_is_raw: bool = False,
    **unused: Unpack[UnusedKda],
) -> Any:
    """Run whole sequences in chunks. Mutates nothing, but initial_state beside initial_state_indices.

    Args:
        q, k: `[batch, tokens, H, K]`; v: `[batch, tokens, HV, V]`, HV a multiple of H. fp32, bf16 or fp16; if not all
            alike, they are copied to fp32. One whose heads are not packed, or whose tokens are not one distance apart,
            is copied. Head sizes of at most 256.
        g: `[batch, tokens, HV, K]`, the log of the decays, at most 0. beta: `[batch, tokens, HV]`, of moderate size (0
            to 2, say). Any of the three dtypes; used in fp32.
        scale: of q, above 0; None is K**-0.5.
        initial_state: `[N, HV, K, V]`, any of the three dtypes; None is zero.
        use_qk_l2norm_in_kernel: divide q and k by their norms.
        use_gate_in_kernel: g is what `fused_kda_gate` takes, with A_log of HV values and dt_bias of HV * K, both of any
            shape, and lower_bound. A_log may be None beside lower_bound, dt_bias always. False: they say nothing. None:
            they are not there, but beside initial_state_indices an A_log says what True does.
        use_beta_sigmoid_in_kernel: the strength is sigmoid(beta), with allow_neg_eigval twice that. beta_is_raw:
            likewise, SGLang's name.
        safe_gate: a promise that decays have a lower bound, which nothing here needs; the bound has to be told beside
            use_gate_in_kernel.
        disable_recompute: changes nothing.
        return_intermediate_states: return the states before chunks too; chunk_size is 64 then.
        state_v_first: initial and final states are `[N, HV, V, K]`. transpose_state_layout, its older name, counts in
            its place, with a DeprecationWarning, and not beside True.
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each sequence and the end of the last; the batch is 1
            then. None: each of the batch is a sequence.
        chunk_size: 32 or 64, and changes nothing, as `unused`: what others pass (`UnusedKda`).
        initial_state_indices: `(N,)`, the slot of each sequence, perhaps more than N, as SGLang has it: initial_state
            is a pool `[slots, HV, V, K]` of packed states at any distance, and final states go there, each rounded when
            it is stored. A sequence with a negative slot is skipped: its outputs are zero, no slot is touched. Not
            beside output_final_state and return_intermediate_states.
        output_intermediate_states: beside these, as return_intermediate_states without.

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no sequence; and `[N, HV, K, V]` fp32 if
        `output_final_state`, else None. The final state of an empty sequence is its initial one. With
        return_intermediate_states behind these `[batch, chunks, HV, K, V]` in k's dtype, the state before each chunk of
        64 tokens or of a sequence's last ones; with cu_seqlens those of one sequence behind those of the other, and
        the host waits for the GPU to know how many. Beside initial_state_indices o alone, or, with
        output_intermediate_states, o and these, `[batch, chunks, HV, V, K]`, zero for skipped sequences.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check_chunks(unused)
    check_flag("disable_recompute", disable_recompute)
    check_flag("safe_gate", safe_gate)
    check_flag("return_intermediate_states", return_intermediate_states)
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64, got {describe(chunk_size)}")
    if return_intermediate_states and chunk_size != WAYPOINT_TOKENS:
        raise ValueError(f"chunk_size: expected 64, as return_intermediate_states is True, got {chunk_size}")
    check_flag("output_intermediate_states", output_intermediate_states)
    check_flag("beta_is_raw", beta_is_raw)
    has_pool = initial_state_indices is not None
    gate = parse_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, implied=has_pool)
    if safe_gate and gate is not None and lower_bound is None:
        raise ValueError("lower_bound: expected a number, as safe_gate and use_gate_in_kernel are given, got None")
    check_flag("output_final_state", output_final_state)
    check_flag("state_v_first", state_v_first)
    v_first = parse_order(state_v_first, transpose_state_layout)
    inputs = pack_delta(q, k, v, {"g": g, "beta": beta}, scale, normalize=use_qk_l2norm_in_kernel, keyed=True)
    inputs = with_gates(inputs, gate, use_beta_sigmoid_in_kernel or beta_is_raw, allow_neg_eigval)
    rows = lay_out(v, cu_seqlens)
    between = k.dtype if return_intermediate_states or output_intermediate_states else None
    if initial_state_indices is not None:
        given = "as initial_state_indices is given"
        check_is(False, given, output_final_state=output_final_state)
        check_is(False, given, return_intermediate_states=return_intermediate_states)
        o, states = run_pool(inputs, v, rows, initial_state, initial_state_indices, between=between)
        return o if states is None else (o, states)
    check_is(False, "as initial_state_indices is not given", output_intermediate_states=output_intermediate_states)
    return run_sequences(inputs, v, rows, initial_state, output_final_state, v_first, chunked=True, between=between)


@operator(_fake_sequences, mutates=["initial_state"], results=2, unused=_check_rows)
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool | None = None,
    transpose_state_layout: bool | None = None,
    **unused: Unpack[UnusedRows],
) -> tuple[Tensor, Tensor | None]:
    """Run the next tokens of each row, one by one.

    Args:
        q, k, v, g, beta, A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, cu_seqlens: as for `chunk_kda`. Tensors of fp64,
            too, are taken, and used in fp32; a pool may not be one.
        initial_state, output_final_state, state_v_first, transpose_state_layout: likewise, and nothing is mutated; but
            beside ssm_state_indices initial_state is a pool `[slots, HV, V, K]` of packed states at any distance, and
            is mutated: the slots of rows with tokens, each state rounded when it is stored.
        ssm_state_indices: `(N,)` or `(N, columns)`, and num_accepted_tokens: as for `fused_recurrent_gated_delta_rule`.
            Only with state_v_first, and without output_final_state.
        inplace_final_state: nothing, or what is so: True beside ssm_state_indices, False without.
        unused: what fla and transformers pass, and changes nothing (`UnusedRows`).

    Returns:
        What `chunk_kda` does; beside ssm_state_indices o and the pool.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    _check_rows(unused)
    check_flag("output_final_state", output_final_state)
    check_flag("state_v_first", state_v_first)
    v_first = parse_order(state_v_first, transpose_state_layout)
    gate = parse_gate(use_gate_in_kernel, narrow(A_log), narrow(dt_bias), lower_bound)
    tokens, gates = (narrow(q), narrow(k), narrow(v)), {"g": narrow(g), "beta": narrow(beta)}
    inputs = pack_delta(*tokens, gates, scale, normalize=use_qk_l2norm_in_kernel, keyed=True)
    inputs = with_gates(inputs, gate, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    rows = lay_out(v, cu_seqlens)
    has_pool = ssm_state_indices is not None
    given = f"as ssm_state_indices is {'given' if has_pool else 'not given'}"
    if inplace_final_state is not None:
        check_flag("inplace_final_state", inplace_final_state)
        check_is(has_pool, given, inplace_final_state=inplace_final_state)
    if ssm_state_indices is None:
        check_is(None, given, num_accepted_tokens=num_accepted_tokens)
        return run_sequences(inputs, v, rows, narrow(initial_state), output_final_state, v_first, chunked=False)
    check_is(True, given, state_v_first=v_first)
    check_is(False, given, output_final_state=output_final_state)
    pool = check_states("initial_state", initial_state, inputs)
    slots = Slots("ssm_state_indices", pool, ssm_state_indices, accepted=num_accepted_tokens)
    return shape_output(advance_slots(run_rule, inputs, rows, slots, new_output(inputs, v)), v), pool


@operator(_fake_nothing, mutates=["out", "final_state"], results=0)
def flash_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Run whole sequences in chunks, q and k divided by their norms, with the bounded gate and beta = sigmoid(beta).

    Args:
        q, k, v, g: `[batch, tokens, H, K]`, v's heads of V; beta: `[batch, tokens, H]`; as for `chunk_kda`, before
            their gates, but that all have as many heads.
        scale: of q, above 0.
        out: `[batch, tokens, H, V]` contiguous, in v's dtype. Mutated: the tokens of all sequences.
        A_log: of H values; dt_bias: of H * K, both of any shape; lower_bound: at most 0.
        initial_state: `[N, H, V, K]` packed states, any of the three dtypes; None is zero.
        final_state: likewise, None if nobody asks. Mutated: all of it. It is initial_state or shares no memory with it.
        cu_seqlens: as for `chunk_kda`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    inputs = pack_delta(q, k, v, {"g": g, "beta": beta}, scale, normalize=True, keyed=True)
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"q: expected the {v.shape[2]} heads of v, got {q.shape[2]}")
    if lower_bound is None:
        raise TypeError("lower_bound: expected a number, got NoneType")
    inputs = with_gates(inputs, (A_log, dt_bias, lower_bound), sigmoid=True, doubles=False)
    sizes = dict(zip(("batch", "tokens", "H", "V"), v.shape, strict=True))
    check_operand("out", out, sizes, (v.dtype,), v.device, beside="v", contiguous=True)
    rows = lay_out(v, cu_seqlens)
    for name, states in (("initial_state", initial_state), ("final_state", final_state)):
        if states is not None:
            check_states(name, states, inputs, rows.num_rows)
    advance_rows(inputs, rows, initial_state, final_state, out.flatten(0, 1), chunked=True)
