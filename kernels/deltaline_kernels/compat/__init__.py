"""Operations under the names, signatures and state layouts that inference engines call them by.

Each is an adapter to an operation of this package.
"""

from deltaline_kernels.compat.chunk_scan import mamba_chunk_scan_combined_varlen
from deltaline_kernels.compat.conv1d import causal_conv1d_fn, causal_conv1d_update
from deltaline_kernels.compat.conv1d.states import causal_conv1d_varlen_states
from deltaline_kernels.compat.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    flash_kda_fwd,
    fused_kda_gate,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_kda,
    fused_recurrent_kda_packed_decode,
    fused_sigmoid_gating_delta_rule_update,
)
from deltaline_kernels.compat.flex import flex_decoding
from deltaline_kernels.compat.lora import lora_expand, lora_shrink
from deltaline_kernels.compat.mamba2 import selective_state_update
from deltaline_kernels.compat.mhc import mhc_fused_post_pre, mhc_post, mhc_pre
from deltaline_kernels.compat.moe import fused_experts
from deltaline_kernels.compat.selective_scan import selective_scan_fn, selective_scan_varlen

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "flash_kda_fwd",
    "flex_decoding",
    "fused_experts",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
    "lora_expand",
    "lora_shrink",
    "mamba_chunk_scan_combined_varlen",
    "mhc_fused_post_pre",
    "mhc_post",
    "mhc_pre",
    "selective_scan_fn",
    "selective_scan_varlen",
    "selective_state_update",
]
