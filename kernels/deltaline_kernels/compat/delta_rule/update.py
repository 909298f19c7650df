"""The next tokens of either delta rule with their gates, as SGLang and vLLM call it."""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.compat.arguments import (
    INTEGERS,
    UnusedDeltaSteps,
    check_flag,
    check_is,
    check_number,
    check_operand,
    check_unused,
    parse_bound,
)
from deltaline_kernels.compat.delta_inputs import check_beside, pack_biases, pack_delta, pack_rates
from deltaline_kernels.compat.delta_rule.sequences import (
    check_states,
    lay_out,
    new_output,
    run_rule,
    shape_output,
    state_sizes,
)
from deltaline_kernels.compat.slots import Slots, advance_slots
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.operators import operator

# The softplus that the kernels compute.
SOFTPLUS_BETA, SOFTPLUS_THRESHOLD = 1.0, 20.0


def _fake_update(v: Tensor, b: Tensor, initial_state: Tensor | None, final_state: Tensor | None, **_: Any) -> Any:
    o = v.new_empty(*v.shape[:2], b.shape[-1], v.shape[3])
    return o if initial_state is None else (o, initial_state if final_state is None else final_state)


@operator(
    _fake_update,
    mutates=["initial_state_source", "final_state", "initial_state"],
    unused=partial(check_unused, kind=UnusedDeltaSteps),
)
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = SOFTPLUS_BETA,
    softplus_threshold: float = SOFTPLUS_THRESHOLD,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    b: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    output_state_indices: Tensor | None = None,
    final_state: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    initial_state: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool = True,
    beta: float | None = None,
    threshold: float | None = None,
    **unused: Unpack[UnusedDeltaSteps],
) -> Any:
    """Run the next tokens of each row, one by one, with g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b).

    The order is SGLang's; by name vLLM's arguments are taken too.

    Args:
        A_log, dt_bias: `(HV,)`, any of the three dtypes; with is_kda HV and HV * K values of any shape.
        a, b: `[batch, tokens, HV]` or `[batch * tokens, HV]`, any of the three dtypes.
        is_kda: each key channel has a decay of its own: a is `[.., HV, K]` or `[.., HV * K]`, and q may not have more
            heads than v.
        lower_bound: of KDA, at most 0: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)).
        softplus_beta, softplus_threshold: softplus(x) = log(1 + exp(beta x)) / beta, or x where beta x is above the
            threshold. Other ones than 1 and 20 cost a few launches more. beta, threshold: vLLM's names of them, which
            count in their place.
        q, k, v, scale, use_qk_l2norm_in_kernel: as for `fused_recurrent_gated_delta_rule`.
        cu_seqlens: likewise, but that a batch may be beside it: offsets count its tokens one sequence behind the other.
        initial_state_source: `[slots, HV, V, K]`, any of the three dtypes, packed states at any distance. One of the
            shape `[slots, HV, K, V]` has the same memory, in which values come first. Mutated, unless there is another
            final_state or disable_state_update: the slots of rows with tokens.
        initial_state_indices: `(N,)`, the slot of each row, perhaps more than N. A row with a negative slot is skipped:
            its outputs are zero, no slot is touched. Slot 0 is an ordinary one.
        output_state_indices, final_state: as for `fused_recurrent_gated_delta_rule`.
        disable_state_update: no state is written, wherever it would go. Not beside initial_state.
        initial_state: vLLM's pool, in place of initial_state_source and like it, with ssm_state_indices in place of
            initial_state_indices: `(N,)`, or a table `(N, columns)`, beside which num_accepted_tokens may be; as for
            `fused_recurrent_gated_delta_rule`.
        inplace_final_state: True.
        unused: what engines pass, and changes nothing (`UnusedDeltaSteps`).

    Returns:
        o `[batch, tokens, HV, V]` in v's dtype, unspecified for tokens of no row; with initial_state o and it, or
        final_state.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_unused(unused, UnusedDeltaSteps)
    if beta is not None:
        check_number("beta", beta, positive=True)
        softplus_beta = beta
    if threshold is not None:
        check_number("threshold", threshold)
        softplus_threshold = threshold
    check_number("softplus_beta", softplus_beta, positive=True)
    check_number("softplus_threshold", softplus_threshold)
    check_flag("is_kda", is_kda)
    check_flag("disable_state_update", disable_state_update)
    check_flag("inplace_final_state", inplace_final_state)
    if not inplace_final_state:
        raise ValueError("inplace_final_state: expected True, the only meaning that is offered, got False")
    of_vllm = initial_state is not None
    if of_vllm:
        given = "as initial_state is given"
        check_is(None, given, initial_state_source=initial_state_source, initial_state_indices=initial_state_indices)
        check_is(False, given, disable_state_update=disable_state_update)
    else:
        without = "as initial_state is not given"
        check_is(None, without, ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens)
    if not is_kda:
        check_is(None, "as is_kda is False", lower_bound=lower_bound)
    lower_bound = parse_bound("lower_bound", lower_bound)
    v = check_operand("v", v, dict.fromkeys(("batch", "tokens", "HV", "V")))
    normalize = use_qk_l2norm_in_kernel
    inputs = pack_delta(q, k, v, {"a": a, "b": b}, scale, normalize=normalize, flat_gates=True, keyed=is_kda)
    rates, biases = pack_rates("A_log", A_log, inputs), pack_biases("dt_bias", dt_bias, inputs)
    rows = lay_out(v, cu_seqlens, joined=True)
    name, source = ("initial_state", initial_state) if of_vllm else ("initial_state_source", initial_state_source)
    pool = _take_memory(name, source, inputs)
    same = final_state is None or final_state is source
    final = None if same else check_states("final_state", final_state, inputs)
    name, indices, sizes = "initial_state_indices", initial_state_indices, ["rows"]
    if of_vllm:
        name, indices = "ssm_state_indices", ssm_state_indices
        sizes += ["columns"] if isinstance(indices, Tensor) and indices.ndim == 2 else []
    indices = check_beside(name, indices, dict.fromkeys(sizes), INTEGERS, inputs.device)
    slots = Slots(
        name,
        pool,
        indices,
        final,
        output_state_indices,
        "output_state_indices",
        num_accepted_tokens,
        keep=not disable_state_update,
    )
    inputs = _with_decays(inputs, rates, biases, lower_bound, (softplus_beta, softplus_threshold))
    o = shape_output(advance_slots(run_rule, inputs, rows, slots, new_output(inputs, v)), v)
    if initial_state is None:
        return o
    return o, initial_state if final_state is None else final_state


def _with_decays(
    inputs: DeltaInputs, rates: Tensor, biases: Tensor, bound: float | None, softplus: tuple[float, float]
) -> DeltaInputs:
    """Return tokens of which the kernels compute the decays, or with these where their softplus is another."""
    if bound is not None or softplus == (SOFTPLUS_BETA, SOFTPLUS_THRESHOLD):
        return replace(inputs, A_log=rates, dt_bias=biases, lower_bound=bound)
    rise = F.softplus(inputs.a.float() + biases.float(), *softplus)
    rates = rates.float().exp().repeat_interleave(inputs.heads.num_decays // len(rates))
    return replace(inputs, a=-rates * rise, b=inputs.b.float().sigmoid())


def _take_memory(name: str, pool: Tensor | None, inputs: DeltaInputs) -> Tensor:
    """Check and return a pool, V first in memory, which may be of the shape that it has K first."""
    HV, V, K = state_sizes(inputs).values()
    if isinstance(pool, Tensor) and pool.shape[1:] == (HV, K, V) and pool[:1].is_contiguous():
        pool = pool.view(len(pool), HV, V, K)
    return check_states(name, pool, inputs)
