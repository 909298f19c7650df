"""The config of a small model of every family, as checkpoints have it; what a test cares about it changes with `|`."""

from __future__ import annotations

from typing import Any

HIDDEN = 64
GATED_DELTA_NET: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
MAMBA1: dict[str, Any] = {
    "model_type": "mamba",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 6,
}
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
}
HYBRID = GATED_DELTA_NET | {
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
# Of 6 experts a token has 2, and the shared one, which is of another size.
EXPERTS = HYBRID | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# Attention without a gate, norms of heads or a size of them.
BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}
GRANITE = BAMBA | {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
}
# Attention without rotary embeddings, whose norms are over all heads and behind branches.
OLMO = GATED_DELTA_NET | {
    "model_type": "olmo_hybrid",
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "max_position_embeddings": 1000,
}
# Layers of attention, of an MLP and of experts alone, which have no state.
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 32,
    "n_groups": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "max_position_embeddings": 1000,
    "layers_block_type": ["mlp", "linear_attention", "full_attention", "moe"],
}
# Two states in one layer.
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "ssm_multipliers": [0.5, 0.25, 1.5, 0.75, 1.25],
    "key_multiplier": 0.5,
    "mlp_multipliers": [0.75, 0.5],
}
# Mamba-1 with norms of its own, attention without positions, an MLP and experts.
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
    "mamba_dt_rank": 6,
    "num_experts": 6,
}
# Layers whose only state is that of a convolution.
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}
# The same, of which the first layer has an MLP and the others experts, none of them shared.
LFM2_MOE = LFM2 | {
    "model_type": "lfm2_moe",
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Latents in place of keys and values; an MLP, and experts one of which is shared.
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_attention_heads": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "model_max_length": 1000,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
}
# The same around streams of its own, which their mean joins; attention is sparse beyond index_topk tokens.
GLM5_NEXT = {key: value for key, value in KIMI.items() if key not in ("num_experts", "num_experts_per_token")} | {
    "model_type": "glm5_next_text",
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "q_lora_rank": 12,
    "qk_rope_head_dim": 0,
    "max_position_embeddings": 1000,
    "index_topk": 1000,
    "index_kpool": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "swiglu_limit": 0.5,
}
# Layers that share a block, which takes the embeddings too.
ZAMBA: dict[str, Any] = {
    "model_type": "zamba2",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_attention_heads": 8,
    "num_mem_blocks": 2,
    "max_position_embeddings": 1000,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "hidden_act": "gelu",
}
