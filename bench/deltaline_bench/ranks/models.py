"""Small models of every family that ranks share, with heads as large as those of published ones: drawn, fp32."""

from __future__ import annotations

from typing import Any

HIDDEN = 512
_ATTENTION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_SHARED = {"shared_expert_intermediate_size": 128}
_FIRST_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = _ATTENTION | _FIRST_LINEAR
_DELTA |= {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
_MAMBA1 = {
    "model_type": "mamba",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 32,
}
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "rms_norm_eps": 1e-5}
_BAMBA = _ATTENTION | _MAMBA2 | {"model_type": "bamba", "attn_layer_indices": [1]}
_CONVOLUTION = _ATTENTION | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
_KIMI = _ATTENTION | _FIRST_LINEAR
_KIMI |= {
    "model_type": "kimi_linear",
    "num_key_value_heads": 8,
    "linear_num_heads": 8,
    "linear_head_dim": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "model_max_length": 1024,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "delta rule, attention": _DELTA,
    "experts": _DELTA | _EXPERTS | _SHARED | {"model_type": "qwen3_5_moe_text"},
    "interleaved delta rule": _DELTA | _EXPERTS | _SHARED | {"model_type": "qwen3_next"},
    "streams": _DELTA | {"hc_mult": 2},
    "kda, latents": _KIMI,
    "kda, latents, streams": {key: value for key, value in _KIMI.items() if not key.startswith("num_experts")}
    | {
        "model_type": "glm5_next_text",
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "q_lora_rank": 96,
        "qk_rope_head_dim": 0,
        "index_topk": 1024,
        "index_kpool": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "swiglu_limit": 0.5,
    },
    "mamba1": _MAMBA1,
    "mamba1, norms": _MAMBA1 | {"model_type": "falcon_mamba"},
    "mamba1, attention, experts": _ATTENTION
    | {
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 32,
        "num_experts": 8,
        "intermediate_size": 256,
    },
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 64,
        "conv_kernel": 4,
        "n_groups": 2,
    },
    "mamba2, attention": _BAMBA,
    "mamba2, attention, experts": _BAMBA
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "intermediate_size": 128,
        "shared_intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mamba2 beside attention": _ATTENTION
    | _MAMBA2
    | {"model_type": "falcon_h1", "mamba_d_ssm": 1024, "mamba_n_groups": 2, "key_multiplier": 0.5},
    "mamba2 or one of others": _ATTENTION
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
    },
    "mamba2, shared blocks": {
        "model_type": "zamba2",
        "hidden_size": HIDDEN,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_attention_heads": 8,
        "num_mem_blocks": 2,
        "max_position_embeddings": 1024,
        "n_mamba_heads": 16,
        "mamba_d_state": 64,
        "hidden_act": "gelu",
    },
    "short convolutions": _CONVOLUTION | {"model_type": "lfm2"},
    "short convolutions, experts": _CONVOLUTION | _EXPERTS | {"model_type": "lfm2_moe", "num_dense_layers": 1},
}
"""Configs by what their layers are."""
