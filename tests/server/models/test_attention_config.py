"""What is read from config.json about attention: as transformers reads it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.small_models import BAMBA, OLMO

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.shapes import AttentionShape
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.parts import MixerKind

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "rms_norm_eps": 1e-6,
}
NEXT = {"model_type": "qwen3_next", "num_experts": 0}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "next": NEXT,
    "heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "attention_bias": True},
    "theta": {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "max_position_embeddings": 1000},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.125}},
    "both": {"rope_theta": 1e3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "old": {"rope_theta": 1e3, "rope_scaling": {"type": "default"}},
    "scaling": NEXT | {"rope_scaling": {"rope_type": "default", "rope_theta": 7e3}, "rope_parameters": None},
    "scaling first": {
        "rope_scaling": {"rope_type": "default", "rope_theta": 7e3},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    },
    "mrope": {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_sizes_are_those_of_transformers(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    raw = TEXT | changes
    shape = ModelConfig.from_mapping(raw).shapes[MixerKind.ATTENTION]
    classes = {"qwen3_next": transformers.Qwen3NextConfig, "qwen3_5_text": transformers.Qwen3_5TextConfig}
    theirs = classes[raw["model_type"]](**{key: value for key, value in raw.items() if key != "model_type"})
    rope = theirs.rope_parameters
    assert rope["rope_type"] == "default"
    assert shape == AttentionShape(
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
        int(theirs.head_dim * rope["partial_rotary_factor"]),
        rope["rope_theta"],
        theirs.max_position_embeddings,
        theirs.attention_bias,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            "rope_parameters.rope_type: expected default, linear,",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope_scaling.factor: expected a positive number that fp32",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_parameters.'factor': expected none"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.'full_attention': expected none"),
        ({"rope_parameters": ["default"]}, "rope_parameters: expected an object"),
        ({"rope_theta": 0}, "rope_theta: expected a positive number that fp32 holds, got 0"),
        (
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor: expected an even number of rotated channels in 2..256",
        ),
        ({"head_dim": 12}, "partial_rotary_factor: expected an even number of rotated channels in 2..12, got nothing"),
        ({"head_dim": 512}, r"head_dim: expected an integer in 2..256, got 512"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "num_attention_heads: expected a multiple of num_key"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: expected an integer"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_is_not_served_is_told_by_name(changes: dict[str, Any], message: str) -> None:
    config = ModelConfig.from_mapping(TEXT | changes)
    assert MixerKind.ATTENTION not in config.shapes
    assert config.unserved[MixerKind.ATTENTION].startswith(message)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({}, 10000.0),
        ({"rope_parameters": None}, 10000.0),
        ({"rope_theta": None}, None),
        ({"rope_theta": 5.0}, 5.0),
        ({"rope_parameters": {"rope_theta": None}}, None),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 5.0}, None),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, None),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": None}, 7.0),
    ],
    ids=str,
)
def test_olmo_hybrid_rotates_where_there_is_a_base(keys: dict[str, Any], theta: float | None) -> None:
    """As transformers reads them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    shape = ModelConfig.from_mapping(OLMO | {"rope_parameters": None} | keys).shapes[MixerKind.ATTENTION]
    assert isinstance(shape, AttentionShape)
    assert transformers.OlmoHybridConfig(**keys).rope_parameters["rope_theta"] == theta
    assert (shape.rotary_dim, shape.rope_theta) == ((0, 1.0) if theta is None else (8, theta))


@pytest.mark.parametrize("beside", [{}, {"num_key_value_heads": None}], ids=["no-key", "null"])
def test_kv_heads_of_bamba_are_8_where_its_config_has_no_number(beside: dict[str, Any]) -> None:
    """As transformers has them: as many as heads where there is null."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    raw = {key: value for key, value in BAMBA.items() if key != "num_key_value_heads"}
    raw |= {"num_attention_heads": 16} | beside
    shape = ModelConfig.from_mapping(raw).shapes[MixerKind.ATTENTION]
    assert isinstance(shape, AttentionShape)
    assert shape.num_kv_heads == transformers.BambaConfig.from_dict(raw).num_key_value_heads


def test_a_context_is_within_what_the_checkpoint_was_made_for() -> None:
    config = ModelConfig.from_mapping(TEXT | {"max_position_embeddings": 100})
    assert config.with_context(0) is config and config.with_context(100) == config
    shape = config.with_context(60).shapes[MixerKind.ATTENTION]
    assert isinstance(shape, AttentionShape) and shape.max_positions == 60
    with pytest.raises(ModelError, match=r"--max-context: expected at most 100 \(max_position_embeddings\), got 101"):
        config.with_context(101)
