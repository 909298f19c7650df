"""Kernels of recurrent layers: each has an fp32 reference, a Triton kernel and a CPU path.

They compute on tensors, rows and lines; models, sequences and requests are what others make of these. A family
validates its arguments and picks the path by device.
"""

from deltaline_kernels.activation import silu_and_mul, silu_and_mul_reference
from deltaline_kernels.attention import (
    BlockLists,
    Modifiers,
    and_masks,
    find_modifier,
    flex_decode,
    flex_decode_reference,
    or_masks,
)
from deltaline_kernels.checks import (
    FP8_BLOCK,
    MAX_BEHIND_LATENT,
    MAX_CONV_WIDTH,
    MAX_HEAD_DIM,
    MAX_LATENT_DIM,
    MIN_CONV_WIDTH,
)
from deltaline_kernels.conv1d import causal_conv1d, causal_conv1d_reference
from deltaline_kernels.fp8 import can_multiply_fp8, multiply_fp8, multiply_fp8_reference, pack_fp8
from deltaline_kernels.gated_delta import gated_delta, gated_delta_reference
from deltaline_kernels.kda import kda, kda_reference
from deltaline_kernels.linear import linear, linear_reference
from deltaline_kernels.lora import (
    MAX_RANK,
    AdapterTiles,
    LoraWeights,
    add_lora,
    add_lora_reference,
    group_tokens,
    spread_slots,
    spread_slots_reference,
)
from deltaline_kernels.mamba1 import mamba1, mamba1_reference
from deltaline_kernels.mamba2 import mamba2, mamba2_reference
from deltaline_kernels.mhc import (
    MAX_STREAMS,
    Gates,
    mhc_head,
    mhc_head_reference,
    mhc_post,
    mhc_post_pre,
    mhc_post_pre_reference,
    mhc_post_reference,
    mhc_pre,
    mhc_pre_reference,
    prepare_gates,
)
from deltaline_kernels.moe import (
    MAX_EXPERTS,
    MAX_TOP_K,
    Router,
    route_and_run_experts,
    route_and_run_experts_reference,
    route_tokens,
    route_tokens_reference,
    run_experts,
    run_experts_reference,
)
from deltaline_kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from deltaline_kernels.rotary import rotate_and_store, rotate_and_store_reference
from deltaline_kernels.rows import WAYPOINT_TOKENS, Rows
from deltaline_kernels.selftest.run import Check, run_selftest

__all__ = [
    "FP8_BLOCK",
    "MAX_BEHIND_LATENT",
    "MAX_CONV_WIDTH",
    "MAX_EXPERTS",
    "MAX_HEAD_DIM",
    "MAX_LATENT_DIM",
    "MAX_RANK",
    "MAX_STREAMS",
    "MAX_TOP_K",
    "MIN_CONV_WIDTH",
    "WAYPOINT_TOKENS",
    "AdapterTiles",
    "BlockLists",
    "Check",
    "Gates",
    "LoraWeights",
    "Modifiers",
    "Router",
    "Rows",
    "add_lora",
    "add_lora_reference",
    "add_rms_norm",
    "add_rms_norm_reference",
    "and_masks",
    "can_multiply_fp8",
    "causal_conv1d",
    "causal_conv1d_reference",
    "find_modifier",
    "flex_decode",
    "flex_decode_reference",
    "gated_delta",
    "gated_delta_reference",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "group_tokens",
    "kda",
    "kda_reference",
    "linear",
    "linear_reference",
    "mamba1",
    "mamba1_reference",
    "mamba2",
    "mamba2_reference",
    "mhc_head",
    "mhc_head_reference",
    "mhc_post",
    "mhc_post_pre",
    "mhc_post_pre_reference",
    "mhc_post_reference",
    "mhc_pre",
    "mhc_pre_reference",
    "multiply_fp8",
    "multiply_fp8_reference",
    "or_masks",
    "pack_fp8",
    "prepare_gates",
    "rms_norm",
    "rms_norm_reference",
    "rotate_and_store",
    "rotate_and_store_reference",
    "route_and_run_experts",
    "route_and_run_experts_reference",
    "route_tokens",
    "route_tokens_reference",
    "run_experts",
    "run_experts_reference",
    "run_selftest",
    "silu_and_mul",
    "silu_and_mul_reference",
    "spread_slots",
    "spread_slots_reference",
]
