"""Configs of families with KDA and latent attention: what they may leave out, and lies, each refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.small_models import GLM5_NEXT, KIMI

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.model import ModelOptions, check_model
from deltaline_server.models.parts import MixerKind, MlpKind

WITHOUT = {name: value for name, value in KIMI.items() if name != "layer_types"} | {"num_hidden_layers": 4}
NUMBERED = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 8, "head_dim": 24}
# What lies, in which key, with what; and what the message says.
LIES: list[tuple[dict[str, Any], str, Any, str]] = [
    (KIMI, "layer_types", ["mamba", "full_attention"], "expected 2 of linear_attention, full_attention, got"),
    (KIMI, "mlp_layer_types", ["dense"], "expected 2 of dense, sparse, got ['dense']"),
    (KIMI, "first_k_dense_replace", -1, "expected an integer in 0..4096, got -1"),
    (KIMI, "kv_lora_rank", 3, "expected an integer in 4..512, got 3"),
    (KIMI, "kv_lora_rank", 513, "expected an integer in 4..512, got 513"),
    (KIMI, "qk_rope_head_dim", 1, "expected 0 or 2..128, got 1"),
    (KIMI, "qk_rope_head_dim", 129, "expected an integer in 0..128, got 129"),
    (KIMI, "qk_nope_head_dim", 0, "expected an integer in 1..256, got 0"),
    (KIMI, "v_head_dim", 257, "expected an integer in 1..256, got 257"),
    (KIMI, "q_lora_rank", 0, "expected an integer in 1..1048576, got 0"),
    (KIMI, "num_key_value_heads", 2, "expected num_attention_heads (8), as latents make keys for each, got 2"),
    (KIMI, "attention_bias", True, "expected false, got True"),
    (KIMI, "model_max_length", 0, "expected an integer in 1..16777216, got 0"),
    (KIMI, "linear_num_heads", 0, "expected an integer in 1..4096, got 0"),
    (KIMI, "num_experts_per_token", 7, "expected an integer in 1..6, got 7"),
    (KIMI, "num_expert_group", 4, "expected a divisor of 6 experts, with at least 2 in a group, got 4"),
    (KIMI, "num_shared_experts", 0, "expected an integer in 1..64, got 0"),
    (KIMI, "moe_renormalize", 1, "expected true or false, got 1"),
    (KIMI, "hidden_act", "gelu", "expected 'silu', got 'gelu'"),
    (WITHOUT, "linear_attn_config", NUMBERED | {"kda_layers": [1]}, "what full_attn_layers leaves of the layers 1..4"),
    (WITHOUT, "linear_attn_config", NUMBERED | {"kda_layers": "1"}, "expected a list of layer numbers, got '1'"),
    (WITHOUT, "linear_attn_config", NUMBERED | {"head_dim": 257}, "expected an integer in 1..256, got 257"),
    (GLM5_NEXT, "layer_types", ["conv"] * 2, "full_attention, deepseek_sparse_attention, got"),
    (GLM5_NEXT, "index_topk", 992, "--max-context: expected at most 992 (index_topk)"),
    (
        GLM5_NEXT,
        "index_topk",
        999,
        "expected a multiple of index_kpool (8; 16 without), as whole pools are selected (2048 without), got 999",
    ),
    (GLM5_NEXT, "index_kpool", 0, "expected an integer in 1..16777216, got 0"),
    (GLM5_NEXT, "index_kpool", "8", "expected an integer in 1..16777216, got '8'"),
    (GLM5_NEXT, "index_topk", 0, "expected an integer in 1..16777216, got 0"),
    (GLM5_NEXT, "index_kpool_always_select_tail", False, "expected true (else the last tokens may see too few)"),
    (GLM5_NEXT, "swiglu_limit", 0, "expected a positive number that fp32 holds, got 0"),
    (GLM5_NEXT, "swiglu_limit", None, "expected a positive number that fp32 holds, got None"),
    (GLM5_NEXT, "hc_mult", 9, "expected an integer in 1..8, got 9"),
    (GLM5_NEXT, "linear_lower_bound", 0.5, "linear_lower_bound"),
]


def check(folder: Path, raw: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    check_model(ModelOptions(torch.device("cpu"), random_init=path))


@pytest.mark.parametrize(
    "base", [KIMI, WITHOUT, WITHOUT | {"linear_attn_config": NUMBERED}, KIMI | {"q_lora_rank": 12}, GLM5_NEXT]
)
def test_the_truth_is_served(tmp_path: Path, base: dict[str, Any]) -> None:
    check(tmp_path, base)


@pytest.mark.parametrize(("base", "key", "lie", "expected"), LIES)
def test_a_lie_is_refused_in_one_line(tmp_path: Path, base: dict[str, Any], key: str, lie: Any, expected: str) -> None:
    with pytest.raises(ModelError) as refused:
        check(tmp_path, base | {key: lie})
    message = str(refused.value)
    assert "\n" not in message and expected in message and key in message, message


def test_layers_are_numbered_from_one_as_published_configs_have_them() -> None:
    config = ModelConfig.from_mapping(WITHOUT | {"linear_attn_config": NUMBERED})
    kinds = [MixerKind.KDA, MixerKind.LATENT_ATTENTION] * 2
    assert [layer.mixer for layer in config.layers] == kinds
    assert [layer.mlp for layer in config.layers] == [MlpKind.DENSE, *[MlpKind.MIXTURE_OF_EXPERTS] * 3]
    usual = ModelConfig.from_mapping(WITHOUT | {"num_hidden_layers": 6, "first_k_dense_replace": 2})
    assert [i for i, layer in enumerate(usual.layers) if layer.mixer is MixerKind.LATENT_ATTENTION] == [4]
    assert [i for i, layer in enumerate(usual.layers) if layer.mlp is MlpKind.DENSE] == [0, 1]


def test_both_spellings_of_a_key_are_read() -> None:
    """Those of published configs and those of transformers."""
    told = {"max_position_embeddings": 77, "n_shared_experts": 2, "num_experts_per_tok": 3, "norm_topk_prob": False}
    other = {"model_max_length": 77, "num_shared_experts": 2, "num_experts_per_token": 3, "moe_renormalize": False}
    one, two = (
        ModelConfig.from_mapping({k: v for k, v in KIMI.items() if k not in ("model_max_length", *other)} | keys)
        for keys in (told, other)
    )
    assert one.experts == two.experts and one.shapes == two.shapes
    shape = one.shapes[MixerKind.LATENT_ATTENTION]
    assert shape == LatentShape(8, 24, 8, 16, 12, query_rank=0, max_positions=77)
    assert one.experts is not None and (one.experts.shared_size, one.experts.top_k) == (64, 3)


def test_null_under_another_spelling_is_no_default() -> None:
    """To transformers it is the value, and here a flag is true or false; where the other spelling says more, that is
    read."""
    raw = {k: v for k, v in KIMI.items() if k != "norm_topk_prob"} | {"moe_renormalize": None}
    unserved = ModelConfig.from_mapping(raw).unserved[MlpKind.MIXTURE_OF_EXPERTS]
    assert unserved == "moe_renormalize: expected true or false, got None"
    experts = ModelConfig.from_mapping(raw | {"norm_topk_prob": False}).experts
    assert experts is not None and not experts.normalises
