"""Configs that lie: each is refused in one line that names the key, whether its layers are served whole or in part."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.small_models import HYBRID, MAMBA2

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.model import ModelOptions, check_model

NEXT = HYBRID | {
    "model_type": "qwen3_next",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MOE = NEXT | {"model_type": "qwen3_5_moe_text"}
MANY_EXPERTS = MOE | {"num_experts": 4096}
ONE_EXPERT = NEXT | {"num_experts": 1, "num_experts_per_tok": 1}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 32,
    "intermediate_size": 48,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "hybrid_override_pattern": "M",
}
BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "attn_layer_indices": [1],
    "num_attention_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 32,
    "intermediate_size": 24,
    "shared_intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_local_experts": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}
OLMO: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 4,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
STACK = NEMOTRON | {
    "hybrid_override_pattern": "M-*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
}
ZAMBA: dict[str, Any] = {
    "model_type": "zamba2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layers_block_type": ["mamba", "hybrid"],
    "num_attention_heads": 4,
    "n_mamba_heads": 4,
    "mamba_d_state": 16,
    "hidden_act": "gelu",
}
MAMBA_SSM: dict[str, Any] = {"d_model": 32, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2", "headdim": 16}}
GONE = object()
"""In place of a value: the key is not there."""
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OTHER_METHODS: tuple[Any, ...] = ("gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "FP8", 8, None, [8])
NO_BLOCKS: tuple[Any, ...] = (128, [128], [128, 0], [128, -1], [128, 128.0], [True, 128], [128] * 3, ["128"] * 2, {})
NOT_BLOCKS = "quantization_config.weight_block_size: expected two integers in 1..1048576, got "
NOT_FP8 = (
    "expected 'fp8' (e4m3 weights with scales of blocks or of whole tensors; no other quantised weights are served)"
)
# What lies, in which key, with what; and how the message goes on behind the key.
LIES: list[tuple[dict[str, Any], str, Any, str]] = [
    (NEXT, "num_experts", -1, "expected an integer in 0.."),
    (NEXT, "num_experts", 2.5, "expected an integer in 0.."),
    (NEXT, "num_experts", "8", "expected an integer in 0.."),
    (NEXT, "num_experts", True, "expected an integer in 0.."),
    (NEXT, "num_experts", 5000, "expected an integer in 1..4096, got 5000"),
    (NEXT, "num_experts", 10**30, "expected an integer in 0..1048576"),
    (NEXT, "num_experts", 1, "expected an integer in 1..1, got 2"),
    (NEXT, "num_experts_per_tok", 0, "expected an integer in 1..8, got 0"),
    (NEXT, "num_experts_per_tok", 9, "expected an integer in 1..8, got 9"),
    (NEXT, "num_experts_per_tok", None, "expected an integer in 1..8, got None"),
    (NEXT, "num_experts_per_tok", GONE, "expected an integer in 1..8, got nothing"),
    (NEXT, "moe_intermediate_size", 0, "expected an integer in 1..1048576, got 0"),
    (NEXT, "moe_intermediate_size", -32, "expected an integer in 1..1048576"),
    (NEXT, "moe_intermediate_size", [32], "expected an integer in 1..1048576"),
    (NEXT, "moe_intermediate_size", 1 << 40, "expected an integer in 1..1048576"),
    (NEXT, "shared_expert_intermediate_size", 0, "expected an integer in 1..1048576, got 0"),
    (NEXT, "shared_expert_intermediate_size", "32", "expected an integer in 1..1048576"),
    (NEXT, "shared_expert_intermediate_size", 2049, "expected at most 64 times moe_intermediate_size (32), got 2049"),
    (NEXT, "norm_topk_prob", 1, "expected true or false, got 1"),
    (NEXT, "shared_expert_intermediate_size", None, "expected an integer in 1..1048576, got None"),
    (NEXT, "norm_topk_prob", "yes", "expected true or false"),
    (NEXT, "norm_topk_prob", None, "expected true or false, got None"),
    (NEXT, "decoder_sparse_step", 0, "expected an integer in 1..1048576, got 0"),
    (NEXT, "decoder_sparse_step", -1, "expected an integer in 1..1048576"),
    (NEXT, "decoder_sparse_step", "2", "expected an integer in 1..1048576"),
    (NEXT, "mlp_only_layers", 1, "expected a list of layer numbers, got 1"),
    (NEXT, "mlp_only_layers", ["1"], "expected a list of layer numbers"),
    (NEXT, "mlp_only_layers", {"1": 1}, "expected a list of layer numbers"),
    (NEXT, "mlp_only_layers", [True], "expected a list of layer numbers"),
    (NEXT, "mlp_only_layers", [0.5], "expected a list of layer numbers"),
    (NEXT, "intermediate_size", GONE, "expected an integer in 1..1048576, got nothing"),
    (MOE, "num_experts", 0, "expected an integer in 1..4096, got 0"),
    (MOE, "num_experts", None, "expected an integer in 1..4096, got None"),
    (MOE, "num_experts_per_tok", 100, "expected an integer in 1..8, got 100"),
    (MOE, "num_experts_per_tok", 2.0, "expected an integer in 1..8, got 2.0"),
    (MOE, "num_experts_per_tok", True, "expected an integer in 1..8, got True"),
    (MOE, "num_experts_per_tok", 65, "expected an integer in 1..8, got 65"),
    (MANY_EXPERTS, "num_experts_per_tok", 65, "expected an integer in 1..64, got 65"),
    (MOE, "moe_intermediate_size", 0.5, "expected an integer in 1..1048576"),
    (MOE, "shared_expert_intermediate_size", -1, "expected an integer in 1..1048576"),
    (MOE, "hidden_act", "relu2", "expected 'silu', got 'relu2'"),
    (MOE, "model_type", "qwen3_6_moe", "expected one of qwen3_next, "),
    (MOE, "model_type", 5, "expected one of qwen3_next, "),
    (MOE, "model_type", GONE, "expected one of qwen3_next, "),
    (MOE, "quantization_config", {"bits": 4}, f"quantization_config.quant_method: {NOT_FP8}, got nothing"),
    (MOE, "quantization_config", {}, f"quantization_config.quant_method: {NOT_FP8}, got nothing"),
    (MOE, "quantization_config", "fp8", "expected an object, got 'fp8'"),
    (MOE, "quantization_config", [FP8], "expected an object, got ["),
    *((MOE, "quantization_config", FP8 | {"quant_method": one}, f".quant_method: {NOT_FP8}") for one in OTHER_METHODS),
    (MOE, "quantization_config", FP8 | {"fmt": "e5m2"}, "quantization_config.fmt: expected 'e4m3', got 'e5m2'"),
    (MOE, "quantization_config", FP8 | {"fmt": None}, "quantization_config.fmt: expected 'e4m3', got None"),
    (MOE, "quantization_config", FP8 | {"activation_scheme": "both"}, "expected 'dynamic' or 'static', got 'both'"),
    *((MOE, "quantization_config", FP8 | {"weight_block_size": one}, NOT_BLOCKS) for one in NO_BLOCKS),
    (MOE, "quantization_config", FP8 | {"ignored_layers": "lm_head"}, "ignored_layers: expected a list of names of"),
    (MOE, "quantization_config", FP8 | {"modules_to_not_convert": [1]}, "modules_to_not_convert: expected a list of"),
    (MOE, "num_hidden_layers", 0, "expected an integer in 1..4096, got 0"),
    (MOE, "num_hidden_layers", 3, "layer_types: expected 3 of linear_attention, full_attention"),
    (MOE, "num_hidden_layers", GONE, "expected an integer in 1..4096, got nothing"),
    (MOE, "layer_types", ["linear_attention", "sliding_attention"], "expected 2 of linear_attention, full_attention"),
    (MOE, "layer_types", [["linear_attention"], None], "expected 2 of linear_attention, full_attention"),
    (MOE, "layer_types", "linear_attention", "expected 2 of linear_attention, full_attention"),
    (MOE, "hidden_size", 0, "expected an integer in 1..1048576, got 0"),
    (MOE, "hidden_size", None, "expected an integer in 1..1048576, got None"),
    (MOE, "hidden_size", math.inf, "expected an integer in 1..1048576"),
    (MOE, "rms_norm_eps", -1e-6, "expected a positive number that fp32 holds"),
    (MOE, "rms_norm_eps", math.nan, "expected a positive number that fp32 holds"),
    (MOE, "linear_num_key_heads", 0, "expected an integer in 1..4096, got 0"),
    (MOE, "linear_num_value_heads", 3, "expected a multiple of linear_num_key_heads (2), got 3"),
    (MOE, "linear_key_head_dim", 300, "expected an integer in 1..256, got 300"),
    (MOE, "linear_value_head_dim", None, "expected an integer in 1..256, got None"),
    (MOE, "linear_conv_kernel_dim", 1, "expected an integer in 2..6, got 1"),
    (MOE, "num_attention_heads", 5, "expected a multiple of num_key_value_heads (2), got 5"),
    (MOE, "num_key_value_heads", 0, "expected an integer in 1..4096, got 0"),
    (MOE, "head_dim", 1024, "expected an integer in 2..256, got 1024"),
    (MOE, "rope_parameters", {"rope_type": "llama3"}, "expected 'default', got 'llama3'"),
    (MOE, "rope_parameters", 10000, "expected an object, got 10000"),
    (MOE, "max_position_embeddings", 1 << 40, "expected an integer in 1..16777216"),
    (MOE, "attention_bias", "no", "expected true or false"),
    (MOE, "dtype", "float8_e4m3fn", "expected one of float32, bfloat16, float16"),
    (MOE, "hc_mult", 99, "expected an integer in 1..8, got 99"),
    (MAMBA2, "num_heads", 5, "expected num_heads * head_dim / hidden_size"),
    (MAMBA2, "n_groups", 3, "expected a divisor of 4 heads, got 3"),
    (MAMBA2, "time_step_limit", [1, 0], "expected 0 <= least <= greatest"),
    (MAMBA2, "residual_in_fp32", "yes", "expected true or false"),
    (BAMBA, "attn_layer_indices", 1, "expected a list of layer numbers, got 1"),
    (BAMBA, "mamba_d_head", "auto", "expected an integer in 1..256, got 'auto'"),
    (BAMBA, "mamba_expand", 4, "expected mamba_n_heads * mamba_d_head / hidden_size (4 * 16 / 32), got 4"),
    (BAMBA, "mamba_n_groups", 3, "expected a divisor of 4 heads, got 3"),
    (BAMBA, "mlp_bias", 1, "expected true or false, got 1"),
    (BAMBA, "num_attention_heads", GONE, "expected an integer in 1..4096, got nothing"),
    (BAMBA, "num_attention_heads", 32, "expected hidden_size / 2..256, as there is no head_dim, got 32"),
    (BAMBA, "rope_scaling", {"rope_type": "yarn"}, "expected 'default', got 'yarn'"),
    (GRANITE, "layer_types", ["mamba"], "expected 2 of linear_attention, full_attention, mamba, attention"),
    (GRANITE, "layer_types", ["mamba", ["attention"]], "expected 2 of linear_attention, full_attention, mamba, "),
    (GRANITE, "num_local_experts", -1, "expected an integer in 0..1048576, got -1"),
    (GRANITE, "num_experts_per_tok", 5, "expected an integer in 1..4, got 5"),
    (GRANITE, "intermediate_size", GONE, "expected an integer in 1..1048576, got nothing"),
    (GRANITE, "shared_intermediate_size", 24 * 65, "expected at most 64 times intermediate_size (24), got 1560"),
    (GRANITE, "residual_multiplier", 0, "expected a positive number that fp32 holds, got 0"),
    (GRANITE, "attention_multiplier", "1", "expected a positive number that fp32 holds, got '1'"),
    (GRANITE, "position_embedding_type", "alibi", "expected None or 'nope' or 'rope', got 'alibi'"),
    (GRANITE, "hc_mult", 4, "expected none: granitemoehybrid is served with one residual, got 4"),
    (OLMO, "linear_allow_neg_eigval", "yes", "expected true or false, got 'yes'"),
    (
        OLMO,
        "rope_parameters",
        {"rope_theta": 1e4, "rope_type": "yarn"},
        "rope_parameters.rope_type: expected 'default'",
    ),
    (OLMO, "rope_parameters", ["rope_theta"], "expected an object"),
    (OLMO, "num_key_value_heads", 3, "num_attention_heads: expected a multiple of num_key_value_heads (3), got 4"),
    (OLMO, "hc_mult", 4, "expected none: olmo_hybrid is served with one residual, got 4"),
    (MAMBA_SSM, "ssm_cfg", {"headdim": 16}, "ssm_cfg.layer: expected 'Mamba2', got nothing"),
    (MAMBA_SSM, "ssm_cfg", {"layer": "Mamba1"}, "ssm_cfg.layer: expected 'Mamba2', got 'Mamba1'"),
    (MAMBA_SSM, "ssm_cfg", {"layer": "Mamba2", "headdim": 60}, "ssm_cfg.headdim: expected a divisor of 64 channels"),
    (MAMBA_SSM, "ssm_cfg", {"layer": "Mamba2", "ngroups": 2}, "ssm_cfg.ngroups: expected a divisor of 1 heads, got 2"),
    (MAMBA_SSM, "ssm_cfg", {"layer": "Mamba2", "rmsnorm": False}, "ssm_cfg.rmsnorm: expected true, got False"),
    (MAMBA_SSM, "ssm_cfg", {"layer": "Mamba2", "D_has_hdim": True}, "ssm_cfg.D_has_hdim: expected false, got True"),
    (
        MAMBA_SSM,
        "ssm_cfg",
        {"layer": "Mamba2", "d_ssm": 32},
        "ssm_cfg.'d_ssm': expected none (it is not known)",
    ),
    (
        MAMBA_SSM,
        "ssm_cfg",
        {"layer": "Mamba2", "dt_limit": [1, 0]},
        "ssm_cfg.dt_limit: expected 0 <= least <= greatest",
    ),
    (MAMBA_SSM, "ssm_cfg", None, "expected an object, got None"),
    (MAMBA_SSM, "d_model", GONE, "expected an integer in 1..1048576, got nothing"),
    (MAMBA_SSM, "n_layer", 0, "expected an integer in 1..4096, got 0"),
    (MAMBA_SSM, "d_intermediate", 64, "expected 0 (MLPs are not served in this format), got 64"),
    (MAMBA_SSM, "rms_norm", False, "expected true, got False"),
    (MAMBA_SSM, "attn_layer_idx", "1", "expected a list of layer numbers, got '1'"),
    (NEMOTRON, "hybrid_override_pattern", "MX", "expected 1..4096 of linear_attention"),
    (NEMOTRON, "hybrid_override_pattern", GONE, "expected 1..4096 of linear_attention"),
    (NEMOTRON, "ssm_state_size", 0, "expected an integer in 1..256, got 0"),
    (
        STACK,
        "mlp_hidden_act",
        "silu",
        "layer 1: expected an MLP that is served, got another (mlp_hidden_act: expected 'relu2'",
    ),
    (STACK, "mlp_bias", True, "expected none beside experts (it is not served), got True"),
    (STACK, "mlp_bias", "no", "expected true or false, got 'no'"),
    (STACK, "moe_latent_size", 64, "expected none beside experts (it is not served), got 64"),
    (STACK, "intermediate_size", 0, "expected an integer in 1..1048576, got 0"),
    (STACK, "num_attention_heads", 3, "expected a multiple of num_key_value_heads (2), got 3"),
    (STACK, "head_dim", 512, "expected an integer in 2..256, got 512"),
    (STACK, "n_routed_experts", 0, "expected an integer in 1..4096, got 0"),
    (STACK, "n_routed_experts", 5000, "expected an integer in 1..4096, got 5000"),
    (STACK, "num_experts_per_tok", 9, "expected an integer in 1..8, got 9"),
    (STACK, "moe_intermediate_size", -1, "expected an integer in 1..1048576, got -1"),
    (STACK, "moe_shared_expert_intermediate_size", 32 * 65, "expected at most 64 times moe_intermediate_size (32)"),
    (STACK, "n_group", 3, "expected a divisor of 8 experts, with at least 2 in a group, got 3"),
    (STACK, "n_group", 8, "expected a divisor of 8 experts, with at least 2 in a group, got 8"),
    (STACK, "n_group", 0, "expected an integer in 1..8, got 0"),
    (STACK, "topk_group", 2, "expected an integer in 1..1, got 2"),
    (STACK, "routed_scaling_factor", 0, "expected a positive number that fp32 holds, got 0"),
    (STACK, "norm_topk_prob", "yes", "expected true or false, got 'yes'"),
    (STACK, "layer_norm_epsilon", -1, "expected a positive number that fp32 holds, got -1"),
    (FALCON, "mamba_d_ssm", 60, "expected mamba_n_heads * mamba_d_head (4 * 16, at most 256), got 60"),
    (FALCON, "mamba_d_ssm", 0, "expected an integer in 1..1048576, got 0"),
    (FALCON, "mamba_d_ssm", GONE, "expected mamba_n_heads * mamba_d_head (4 * 16, at most 256), got nothing"),
    (FALCON | {"mamba_d_ssm": None}, "mamba_expand", 3, "expected mamba_n_heads * mamba_d_head / hidden_size"),
    (FALCON, "mamba_d_head", "all", "expected an integer in 1..256, got 'all'"),
    (FALCON, "mamba_n_groups", 3, "expected a divisor of 4 heads, got 3"),
    (FALCON, "mamba_rms_norm", 1, "expected true or false, got 1"),
    (FALCON | {"mamba_rms_norm": True}, "mamba_norm_before_gate", "no", "expected true or false, got 'no'"),
    (FALCON, "projectors_bias", None, "expected true or false, got None"),
    (FALCON, "mlp_bias", 0, "expected true or false, got 0"),
    (FALCON, "ssm_multipliers", [1, 1], "expected 5 positive numbers that fp32 holds, got"),
    (FALCON, "ssm_multipliers", [1, 1, 1, 1, 0], "expected a positive number that fp32 holds, got 0"),
    (FALCON, "ssm_multipliers", 1.0, "expected 5 positive numbers that fp32 holds, got 1.0"),
    (FALCON, "mlp_multipliers", [1, "2"], "expected a positive number that fp32 holds, got '2'"),
    (FALCON, "key_multiplier", -1, "expected a positive number that fp32 holds, got -1"),
    (FALCON, "attention_in_multiplier", math.inf, "expected a positive number that fp32 holds"),
    (FALCON, "attention_out_multiplier", True, "expected a positive number that fp32 holds, got True"),
    (FALCON, "ssm_in_multiplier", None, "expected a positive number that fp32 holds, got None"),
    (FALCON, "ssm_out_multiplier", 10**400, "expected a positive number that fp32 holds"),
    (FALCON, "num_key_value_heads", 3, "num_attention_heads: expected a multiple of num_key_value_heads (3), got 4"),
    (FALCON, "rope_parameters", {"rope_type": "yarn"}, "expected 'default', got 'yarn'"),
    (FALCON, "num_hidden_layers", 0, "expected an integer in 1..4096, got 0"),
    (FALCON, "time_step_limit", [0.5], "expected two numbers, got"),
    (ZAMBA, "layers_block_type", None, "expected 2 of linear_attention, hybrid, mamba, got None"),
    (ZAMBA, "layers_block_type", ["hybrid"], "expected 2 of linear_attention, hybrid, mamba, got ['hybrid']"),
    (ZAMBA, "layers_block_type", ["mamba", {}], "expected 2 of linear_attention, hybrid, mamba"),
    (ZAMBA, "num_mem_blocks", 0, "expected an integer in 1..4096, got 0"),
    (ZAMBA, "use_shared_attention_adapter", 1, "expected true or false, got 1"),
    (ZAMBA, "use_mem_rope", "yes", "expected true or false, got 'yes'"),
    (ZAMBA, "use_long_context", None, "expected true or false, got None"),
    (ZAMBA, "n_mamba_heads", 5, "expected a divisor of 64 channels, with heads of 1..256, got 5"),
    (ZAMBA, "mamba_ngroups", 3, "expected a divisor of 4 heads, got 3"),
    (ZAMBA, "num_attention_heads", 64, "expected twice hidden_size / 2..256, got 64"),
    (ZAMBA, "hidden_act", "silu", "expected 'gelu', got 'silu'"),
    (ZAMBA, "add_bias_linear", 0, "expected true or false, got 0"),
    (ZAMBA, "intermediate_size", "48", "expected an integer in 1..1048576, got '48'"),
    (ZAMBA, "time_step_min", 0, "expected a positive number that fp32 holds, got 0"),
    (ZAMBA, "hc_mult", 4, "expected none: zamba2 is served with one residual, got 4"),
]


def check(folder: Path, raw: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    check_model(ModelOptions(torch.device("cpu"), random_init=path))


@pytest.mark.parametrize(
    "base",
    [
        *(NEXT, MOE, ONE_EXPERT, MAMBA2, NEMOTRON, STACK, BAMBA, FALCON, GRANITE, OLMO, ZAMBA, MAMBA_SSM),
        MOE | {"quantization_config": FP8},
        MOE | {"quantization_config": FP8 | {"weight_block_size": None, "activation_scheme": "static", "fmt": "e4m3"}},
        MOE | {"quantization_config": FP8 | {"modules_to_not_convert": ["lm_head"], "ignored_layers": None}},
        MOE | {"quantization_config": None},
    ],
    ids=lambda base: base.get("model_type", "mamba_ssm"),
)
def test_the_truth_is_served(tmp_path: Path, base: dict[str, Any]) -> None:
    check(tmp_path, base)


@pytest.mark.parametrize(("base", "key", "lie", "expected"), LIES)
def test_a_lie_is_refused_in_one_line(tmp_path: Path, base: dict[str, Any], key: str, lie: Any, expected: str) -> None:
    told = {name: value for name, value in (base | {key: lie}).items() if value is not GONE}
    with pytest.raises(ModelError) as refused:
        check(tmp_path, told)
    message = str(refused.value)
    assert "\n" not in message and expected in message, message
    assert key in message or expected.startswith("layer_types"), message
