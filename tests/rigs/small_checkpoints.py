"""Small checkpoints that transformers writes, of every model type that is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rigs.drawn_weights import draw_weights

Keys = dict[str, Any]
# Chunks of the oracle's own Mamba2: of larger ones it computes the whole of few tokens.
CHUNK = 32
# Ids of a model type's own lie beyond a small vocabulary.
NO_TOKENS = {"pad_token_id": None, "eos_token_id": None}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# A decode of these families does not clamp time steps, as their prefill does: no step of these weights is as small.
UNCLAMPED = {"chunk_size": CHUNK, "time_step_min": 1e-6}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}


class Sizes(NamedTuple):
    """Of a model. intermediate: of a dense MLP. Of Mamba2, key_heads are groups and value_heads heads; head_dim is the
    state's, and of nemotron_h the heads' too."""

    hidden: int
    intermediate: int
    layers: int
    key_heads: int
    value_heads: int
    head_dim: int


def _linear(sizes: Sizes) -> Keys:
    """Gated DeltaNet in every layer, unless layer_types are given."""
    return FEW_HEADS | {
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "head_dim": 16,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.head_dim,
        "linear_value_head_dim": sizes.head_dim,
        "layer_types": ["linear_attention"] * sizes.layers,
    }


def _mamba1(sizes: Sizes) -> Keys:
    return {"num_hidden_layers": sizes.layers, "time_step_rank": 6}


def _jamba(sizes: Sizes) -> Keys:
    return FEW_HEADS | {
        "intermediate_size": sizes.intermediate,
        "num_experts": 6,
        "mamba_dt_rank": 6,
        "num_hidden_layers": sizes.layers,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_offset": 0,
    }


def _mamba2(sizes: Sizes) -> Keys:
    return {
        "num_hidden_layers": sizes.layers,
        "chunk_size": CHUNK,
        "num_heads": sizes.value_heads,
        "head_dim": 2 * sizes.hidden // sizes.value_heads,
        "n_groups": sizes.key_heads,
        "state_size": sizes.head_dim,
    }


def _beside_attention(sizes: Sizes) -> Keys:
    """Mamba2 of families that have attention as well."""
    return FEW_HEADS | {
        "num_hidden_layers": sizes.layers,
        "mamba_n_heads": sizes.value_heads,
        "mamba_d_head": 2 * sizes.hidden // sizes.value_heads,
        "mamba_d_state": sizes.head_dim,
        "mamba_n_groups": sizes.key_heads,
        "mamba_chunk_size": CHUNK,
        "intermediate_size": sizes.intermediate,
    }


def _falcon_h1(sizes: Sizes) -> Keys:
    return _beside_attention(sizes) | {"head_dim": 16, "mamba_d_ssm": 2 * sizes.hidden}


def _granite(sizes: Sizes) -> Keys:
    mlp = {"num_local_experts": 0, "intermediate_size": 32, "shared_intermediate_size": sizes.intermediate}
    return _beside_attention(sizes) | mlp


def _zamba2(sizes: Sizes) -> Keys:
    return UNCLAMPED | {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 4,
        "intermediate_size": sizes.intermediate,
        "n_mamba_heads": sizes.value_heads,
        "mamba_d_state": sizes.head_dim,
        "mamba_ngroups": sizes.key_heads,
        "adapter_rank": 4,
    }


def _nemotron(sizes: Sizes) -> Keys:
    return (
        UNCLAMPED
        | FEW_HEADS
        | {
            "layers_block_type": ["linear_attention"] * sizes.layers,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "mamba_num_heads": sizes.value_heads,
            "mamba_head_dim": sizes.head_dim,
            "head_dim": 16,
            "intermediate_size": sizes.intermediate,
            "n_groups": sizes.key_heads,
            "ssm_state_size": sizes.head_dim,
        }
    )


def _short_convolutions(sizes: Sizes) -> Keys:
    return (
        NO_TOKENS
        | FEW_HEADS
        | {
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "layer_types": ["conv"] * sizes.layers,
        }
    )


def _convolutions_and_experts(sizes: Sizes) -> Keys:
    routed = {key: value for key, value in EXPERTS.items() if not key.startswith("shared")}
    return _short_convolutions(sizes) | routed | {"num_dense_layers": 1}


def _latents(sizes: Sizes) -> Keys:
    return NO_TOKENS | {
        "bos_token_id": None,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.value_heads,
        "num_key_value_heads": sizes.value_heads,
        "kv_lora_rank": 2 * sizes.head_dim,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.head_dim // 2,
        "v_head_dim": sizes.head_dim,
        "linear_num_heads": sizes.value_heads,
        "linear_head_dim": sizes.head_dim,
        "moe_intermediate_size": 32,
        "layer_types": ["linear_attention"] * sizes.layers,
    }


def _kimi(sizes: Sizes) -> Keys:
    return _latents(sizes) | {"num_experts": 6, "num_experts_per_token": 2}


def _glm(sizes: Sizes) -> Keys:
    return _latents(sizes) | {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "q_lora_rank": sizes.head_dim,
        "qk_rope_head_dim": 0,
        "index_topk": 64,
        "index_kpool": 4,
        "index_n_heads": 2,
        "index_head_dim": sizes.head_dim,
        "mlp_layer_types": ["dense", *["sparse"] * (sizes.layers - 1)],
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    }


class Type(NamedTuple):
    """How transformers makes a model of a type. config, model: names of classes. keys: the config's, by sizes. vision:
    of the tower, where there is one: `keys` are the language model's then."""

    config: str
    model: str
    keys: Callable[[Sizes], Keys]
    vision: Keys | None = None


CAUSAL, CONDITIONAL = "ForCausalLM", "ForConditionalGeneration"
TYPES: Mapping[str, Type] = {
    "mamba": Type("MambaConfig", f"Mamba{CAUSAL}", _mamba1),
    "falcon_mamba": Type("FalconMambaConfig", f"FalconMamba{CAUSAL}", _mamba1),
    "jamba": Type("JambaConfig", f"Jamba{CAUSAL}", _jamba),
    "mamba2": Type("Mamba2Config", f"Mamba2{CAUSAL}", _mamba2),
    "bamba": Type("BambaConfig", f"Bamba{CAUSAL}", _beside_attention),
    "falcon_h1": Type("FalconH1Config", f"FalconH1{CAUSAL}", _falcon_h1),
    "zamba2": Type("Zamba2Config", f"Zamba2{CAUSAL}", _zamba2),
    "granitemoehybrid": Type("GraniteMoeHybridConfig", f"GraniteMoeHybrid{CAUSAL}", _granite),
    "nemotron_h": Type("NemotronHConfig", f"NemotronH{CAUSAL}", _nemotron),
    "lfm2": Type("Lfm2Config", f"Lfm2{CAUSAL}", lambda s: _short_convolutions(s) | {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": Type("Lfm2MoeConfig", f"Lfm2Moe{CAUSAL}", _convolutions_and_experts),
    "kimi_linear": Type("KimiLinearConfig", f"KimiLinear{CAUSAL}", _kimi),
    "glm5_next": Type("Glm5NextConfig", f"Glm5Next{CONDITIONAL}", _glm, VISION | {"projection_intermediate_size": 32}),
    "olmo_hybrid": Type("OlmoHybridConfig", f"OlmoHybrid{CAUSAL}", lambda s: _linear(s) | NO_TOKENS),
    "qwen3_next": Type("Qwen3NextConfig", f"Qwen3Next{CAUSAL}", lambda s: _linear(s) | EXPERTS | {"num_experts": 0}),
    "qwen3_5_text": Type("Qwen3_5TextConfig", f"Qwen3_5{CAUSAL}", _linear),
    "qwen3_5": Type("Qwen3_5Config", f"Qwen3_5{CONDITIONAL}", _linear, VISION),
    "qwen3_5_moe_text": Type("Qwen3_5MoeTextConfig", f"Qwen3_5Moe{CAUSAL}", lambda s: _linear(s) | EXPERTS),
    "qwen3_5_moe": Type("Qwen3_5MoeConfig", f"Qwen3_5Moe{CONDITIONAL}", lambda s: _linear(s) | EXPERTS, VISION),
}


def write_small_checkpoint(
    directory: Path,
    model_type: str,
    *,
    hidden: int = 256,
    intermediate: int = 384,
    layers: int = 4,
    key_heads: int = 2,
    value_heads: int = 4,
    head_dim: int = 64,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Write config and weights of a model whose weights make mistakes show; return the transformers model.

    All layers are Gated DeltaNet with a dense MLP (with experts, where the model type has no other), or a Mamba2 mixer
    alone, unless `overrides` (of the language model's config) say otherwise. `model.base_model.layers` are its layers,
    but for qwen3_5 and qwen3_5_moe.
    """
    made, sizes = TYPES[model_type], Sizes(hidden, intermediate, layers, key_heads, value_heads, head_dim)
    keys = {"vocab_size": 8, "hidden_size": hidden} | made.keys(sizes) | overrides
    if made.vision is None:
        config = getattr(transformers, made.config)(**keys)
    else:
        config = getattr(transformers, made.config)(
            text_config=keys, vision_config=made.vision | {"out_hidden_size": hidden}
        )
    model: Any = getattr(transformers, made.model)(config)
    draw_weights(model, model_type, seed)
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
