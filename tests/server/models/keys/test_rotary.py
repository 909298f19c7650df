"""Kinds of rotary embeddings: the rotations of each position are those of transformers, others have a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.small_models import BAMBA, FALCON, GRANITE, HYBRID, LFM2, LFM2_MOE, OLMO, ZAMBA

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.mixers.rotary import rotary_table
from deltaline_server.layers.shapes import AttentionShape
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.parts import MixerKind

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen": HYBRID | {"head_dim": 32},
    "bamba": BAMBA,
    "falcon": FALCON,
    "granite": GRANITE | {"position_embedding_type": "rope"},
    "zamba": ZAMBA | {"use_mem_rope": True},
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "olmo": OLMO,
}
CLASSES = {
    "qwen3_5_text": ("qwen3_5", "Qwen3_5Text"),
    "bamba": ("bamba", "Bamba"),
    "falcon_h1": ("falcon_h1", "FalconH1"),
    "granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybrid"),
    "zamba2": ("zamba2", "Zamba2"),
    "lfm2": ("lfm2", "Lfm2"),
    "lfm2_moe": ("lfm2_moe", "Lfm2Moe"),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybrid"),
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 700.0},
    "linear, shorter": {"rope_type": "linear", "factor": 0.5},
    "linear, old": {"type": "linear", "factor": 3},
    "dynamic": {"rope_type": "dynamic", "factor": 2.3},
    "dynamic, first": {"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 100},
    "yarn": YARN,
    "yarn, its own context": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 500.0},
    "yarn, implied": YARN | {"factor": None},
    "yarn, attention": YARN | {"attention_factor": 0.7},
    "yarn, turns": YARN | {"beta_fast": 8, "beta_slow": 0.5},
    "yarn, no whole channels": YARN | {"truncate": False, "beta_fast": 16.0},
    "yarn, mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, one mscale": YARN | {"mscale": 0.707},
    "yarn, mscale of 0": YARN | {"mscale": 0.707, "mscale_all_dim": 0},
    "yarn, short context": YARN | {"original_max_position_embeddings": 5},
    "yarn, few turns": YARN | {"beta_fast": 1, "beta_slow": 1},
    "yarn, shorter": YARN | {"factor": 0.5, "mscale": 1.0, "mscale_all_dim": 2.0},
    "llama3": LLAMA3,
    "llama3, blended": LLAMA3 | {"low_freq_factor": 0.1, "high_freq_factor": 20, "rope_theta": 200.0},
    "llama3, its own context": {key: value for key, value in LLAMA3.items() if "original" not in key},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_rotated_as_by_transformers(family: str, kind: dict[str, Any]) -> None:
    raw = FAMILIES[family] | {"rope_parameters": dict(kind)}
    table = rotary_table(attention_of(raw))
    assert_close(table, table_of_transformers(raw))
    default = {"rope_theta": kind["rope_theta"]} if "rope_theta" in kind else None
    plain = rotary_table(attention_of(raw | {"rope_parameters": default}))
    assert torch.equal(table, plain) == (kind.get("rope_type") == "dynamic")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 64},
        {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 64},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 99.0},
        {"rope_parameters": LLAMA3, "partial_rotary_factor": 0.5},
        {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.5},
        {"rope_parameters": YARN | {"mrope_section": [1, 1, 2], "mrope_interleaved": True}},
    ],
)
def test_keys_in_old_places_are_those_of_transformers(changes: dict[str, Any]) -> None:
    raw = FAMILIES["qwen"] | changes
    assert_close(rotary_table(attention_of(raw)), table_of_transformers(raw))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0]},
            "rope_type: expected default, linear, dynamic, yarn, llama3 (",
        ),
        ({"type": "su"}, "type: expected default, linear, dynamic, yarn, llama3 (longrope turns keys that are stored"),
        (
            {"rope_type": "mrope"},
            "rope_type: expected 'default' or 'linear' or 'dynamic' or 'yarn' or 'llama3', got 'mro",
        ),
        ({"rope_type": ["yarn"]}, "rope_type: expected 'default' or 'linear'"),
        ({"rope_type": "linear"}, "factor: expected a positive number that fp32 holds, got nothing"),
        ({"rope_type": "linear", "factor": 0}, "factor: expected a positive number that fp32 holds, got 0"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "'beta_fast': expected none (it is not known)"),
        ({"rope_type": "dynamic", "factor": -1.0}, "factor: expected a positive number that fp32 holds, got -1.0"),
        ({"rope_type": "yarn"}, "factor: expected a positive number that fp32 holds, got nothing"),
        (YARN | {"factor": "4"}, "factor: expected a positive number that fp32 holds, got '4'"),
        (YARN | {"factor": 0.0}, "factor: expected a positive number that fp32 holds, got 0.0"),
        (
            YARN | {"original_max_position_embeddings": 0},
            "original_max_position_embeddings: expected an integer in 1..",
        ),
        (YARN | {"original_max_position_embeddings": None}, "original_max_position_embeddings: expected an integer in"),
        (YARN | {"original_max_position_embeddings": 1 << 80}, "original_max_position_embeddings: expected an integer"),
        (YARN | {"attention_factor": 0}, "attention_factor: expected a positive number that fp32 holds, got 0"),
        (YARN | {"beta_fast": 0}, "beta_fast: expected a positive number that fp32 holds, got 0"),
        (YARN | {"beta_slow": -1}, "beta_slow: expected a positive number that fp32 holds, got -1"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast: expected at least beta_slow (2), got 1"),
        (YARN | {"mscale": -1, "mscale_all_dim": 1}, "mscale: expected a positive number that fp32 holds, got -1"),
        (YARN | {"mscale_all_dim": "1"}, "mscale_all_dim: expected a positive number that fp32 holds, got '1'"),
        (YARN | {"mscale": 3e38, "mscale_all_dim": 1e-30, "factor": 1e38}, "mscale: expected an attention factor that"),
        (YARN | {"truncate": 1}, "truncate: expected true or false, got 1"),
        (YARN | {"rope_theta": 1.0}, "rope_theta: expected a number above 1 of kind yarn, got 1.0"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor: expected a number above low_freq_factor (4), got 4.0"),
        (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor: expected a positive number that fp32 holds, got 0"),
        (LLAMA3 | {"high_freq_factor": None}, "high_freq_factor: expected a positive number that fp32 holds, got None"),
        (LLAMA3 | {"attention_factor": 1.0}, "'attention_factor': expected none (it is not known)"),
        (
            LLAMA3 | {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: expected 1 or none (this family rotates whole",
        ),
    ],
)
def test_what_is_not_served_is_told_by_name(kind: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        attention_of(FALCON | {"rope_parameters": kind})
    assert f"rope_parameters.{message}" in str(refused.value) and "\n" not in str(refused.value)


def test_a_dynamic_kind_rotates_more_than_one_pair() -> None:
    with pytest.raises(ModelError, match=r"partial_rotary_factor: expected more than 2 rotated channels of a dynamic"):
        attention_of(FALCON | {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})


def test_a_dynamic_kind_is_served_as_long_as_it_is_constant() -> None:
    config = ModelConfig.from_mapping(HYBRID | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    with pytest.raises(ModelError, match=r"--max-context: expected at most 4096 \(max_position_embeddings\), got 4097"):
        config.with_context(4097)


def test_a_state_means_something_else_where_rotations_are_scaled() -> None:
    """And what it meant before where they are not."""
    plain, scaled = (ModelConfig.from_mapping(HYBRID | {"rope_parameters": kind}) for kind in (None, YARN))
    assert plain.meaning() != scaled.meaning()
    assert "rope_scaling" not in plain.meaning()["shapes"][MixerKind.ATTENTION]


def attention_of(raw: dict[str, Any]) -> AttentionShape:
    """What is read of attention. Raises ModelError where it is not served."""
    config = ModelConfig.from_mapping(raw)
    if MixerKind.ATTENTION not in config.shapes:
        raise ModelError(config.unserved[MixerKind.ATTENTION])
    shape = config.shapes[MixerKind.ATTENTION]
    assert isinstance(shape, AttentionShape)
    return shape


def table_of_transformers(raw: dict[str, Any]) -> torch.Tensor:
    """What transformers rotates each position by, as `rotary_table` has it."""
    pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    import importlib

    module, prefix = CLASSES[raw["model_type"]]
    configs = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    keys = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items() if key != "model_type"}
    config = getattr(configs, f"{prefix}Config")(**keys)
    at = torch.arange(config.max_position_embeddings)[None]
    at = at.expand(3, 1, -1) if module == "qwen3_5" else at
    cos, sin = (part[0] for part in getattr(models, f"{prefix}RotaryEmbedding")(config)(torch.zeros(1), at))
    assert isinstance(cos, torch.Tensor)
    half = cos.shape[-1] // 2
    return torch.cat((cos[:, :half], sin[:, :half]), dim=-1)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Angles grow with positions, and so do roundings of frequencies: 4 units in the last place of the largest."""
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * len(ours) * 2.0**-23)
