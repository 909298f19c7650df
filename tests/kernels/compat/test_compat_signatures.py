"""Engines pass arguments by place: names, order and defaults are theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from deltaline_kernels import compat

SIGNATURES = {
    compat.chunk_gated_delta_rule: "q k v g beta scale=None initial_state=None output_final_state=False "
    "cu_seqlens=None use_qk_l2norm_in_kernel=False",
    compat.chunk_kda: "q k v g beta scale=None initial_state=None output_final_state=False "
    "use_qk_l2norm_in_kernel=False use_gate_in_kernel=None use_beta_sigmoid_in_kernel=False allow_neg_eigval=False "
    "safe_gate=False lower_bound=None disable_recompute=False return_intermediate_states=False state_v_first=False "
    "cu_seqlens=None",
    compat.flash_kda_fwd: "q k v g beta scale out A_log dt_bias lower_bound initial_state=None final_state=None "
    "cu_seqlens=None",
    compat.fused_kda_gate: "g A_log=None dt_bias=None lower_bound=None output_dtype=torch.float32",
    compat.fused_recurrent_kda: "q k v g beta A_log=None dt_bias=None scale=None initial_state=None "
    "output_final_state=False use_qk_l2norm_in_kernel=False use_gate_in_kernel=None use_beta_sigmoid_in_kernel=False "
    "allow_neg_eigval=False lower_bound=None state_v_first=False cu_seqlens=None",
    compat.fused_experts: "hidden_states w1 w2 topk_weights topk_ids inplace=False activation=silu "
    "apply_router_weight_on_input=False global_num_experts=-1 expert_map=None quant_config=None",
    compat.fused_recurrent_gated_delta_rule: "q k v g=None beta=None scale=None initial_state=None "
    "inplace_final_state=True cu_seqlens=None ssm_state_indices=None num_accepted_tokens=None "
    "use_qk_l2norm_in_kernel=False",
    compat.fused_recurrent_gated_delta_rule_packed_decode: "mixed_qkv a b A_log dt_bias scale initial_state out "
    "ssm_state_indices use_qk_l2norm_in_kernel=False",
    compat.fused_recurrent_kda_packed_decode: "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices "
    "use_qk_l2norm_in_kernel=False lower_bound=None",
    compat.fused_sigmoid_gating_delta_rule_update: "A_log a dt_bias softplus_beta=1.0 "
    "softplus_threshold=20.0 q=None k=None v=None b=None initial_state_source=None initial_state_indices=None "
    "scale=None use_qk_l2norm_in_kernel=False cu_seqlens=None",
    compat.selective_scan_fn: "u delta A B C D=None z=None delta_bias=None delta_softplus=False "
    "return_last_state=False",
    compat.selective_scan_varlen: "u ssm_states delta A B C D=None z=None delta_bias=None delta_softplus=False "
    "query_start_loc=None cache_indices=None has_initial_state=None pad_slot_id=-1",
    compat.selective_state_update: "state x dt A B C D=None z=None dt_bias=None dt_softplus=False "
    "state_batch_indices=None pad_slot_id=-1 num_accepted_tokens=None cu_seqlens=None out=None",
}
SCAN = (
    "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices seq_idx out D z dt_bias initial_states "
    "dt_softplus dt_limit return_intermediate_states state_dtype final_states_out final_state_indices"
)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_engines_may_pass_arguments_by_position(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    by_place = [p for p in parameters if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    told = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in by_place]
    assert " ".join(told) == SIGNATURES[function]


def test_scan_has_the_engines_arguments() -> None:
    assert list(inspect.signature(compat.mamba_chunk_scan_combined_varlen).parameters) == SCAN.split()
