"""Both delta rules under the names that engines call them by: sequences, next tokens, and these with gates."""

from deltaline_kernels.compat.delta_rule.gate import fused_kda_gate
from deltaline_kernels.compat.delta_rule.gated import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from deltaline_kernels.compat.delta_rule.kda import chunk_kda, flash_kda_fwd, fused_recurrent_kda
from deltaline_kernels.compat.delta_rule.packed import (
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_kda_packed_decode,
)
from deltaline_kernels.compat.delta_rule.update import fused_sigmoid_gating_delta_rule_update

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "flash_kda_fwd",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
]
