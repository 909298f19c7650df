"""The configs of Mamba2 models and of Nemotron-H: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.shapes import Mamba2Shape
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.parts import LayerConfig, MixerKind, MlpKind

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
}
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 4,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
}
MAMBA, ATTENTION = (MixerKind.MAMBA2, None), (MixerKind.ATTENTION, None)
DENSE, EXPERTS = (None, MlpKind.DENSE), (None, MlpKind.MIXTURE_OF_EXPERTS)


def test_mamba2() -> None:
    config = ModelConfig.from_mapping(MAMBA2)
    shape = config.shapes[MixerKind.MAMBA2]
    assert isinstance(shape, Mamba2Shape)
    assert shape == Mamba2Shape(2, 8, 32, 16, 4, 1, (0.0, math.inf), has_conv_bias=True, has_bias=False)
    assert (shape.value_channels, shape.conv_channels, shape.state) == (128, 256, (8, 16, 32))
    assert config.layers == tuple(LayerConfig(i, *MAMBA) for i in range(2))
    assert (config.rms_norm_eps, config.residual_in_fp32, config.has_mlp_blocks) == (1e-5, True, False)


def test_nemotron_h() -> None:
    config = ModelConfig.from_mapping(NEMOTRON)
    assert config.shapes[MixerKind.MAMBA2] == Mamba2Shape(
        4, 8, 32, 12, 4, 4, (0.001, math.inf), has_conv_bias=True, has_bias=False
    )
    assert config.layers == tuple(LayerConfig(i, *parts) for i, parts in enumerate([MAMBA, DENSE, ATTENTION, EXPERTS]))
    assert (config.residual_in_fp32, config.has_mlp_blocks) == (False, False)


@pytest.mark.parametrize(
    "spelling", [{"layers_block_type": ["mamba", "mlp", "attention", "moe"]}, {"hybrid_override_pattern": "M-*E"}]
)
def test_the_old_spellings_of_layers(spelling: dict[str, Any]) -> None:
    raw = {key: value for key, value in NEMOTRON.items() if key != "layers_block_type"} | spelling
    assert ModelConfig.from_mapping(raw).layers == ModelConfig.from_mapping(NEMOTRON).layers


def test_the_old_spellings_of_a_mixer() -> None:
    """The checkpoint's model lets them go before the new ones."""
    old = {"mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_dt_min": 0.5, "mamba_conv_bias": False}
    shape = ModelConfig.from_mapping(NEMOTRON | old).shapes[MixerKind.MAMBA2]
    assert shape == Mamba2Shape(2, 8, 32, 12, 3, 2, (0.5, math.inf), has_conv_bias=False, has_bias=False)
    with pytest.raises(ModelError, match="mamba_n_groups: expected a divisor of 8 heads, got 3"):
        ModelConfig.from_mapping(NEMOTRON | {"mamba_n_groups": 3})


@pytest.mark.parametrize("least", [0, 0.0])
def test_the_least_time_step_may_be_zero(least: float) -> None:
    shape = ModelConfig.from_mapping(NEMOTRON | {"time_step_min": least}).shapes[MixerKind.MAMBA2]
    assert isinstance(shape, Mamba2Shape) and shape.dt_limit == (0.0, math.inf)


def test_nemotron_h_need_not_say_the_size_of_mlps() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    raw = {key: value for key, value in NEMOTRON.items() if key != "intermediate_size"}
    assert ModelConfig.from_mapping(raw).intermediate_size == transformers.NemotronHConfig().intermediate_size


@pytest.mark.parametrize("text", ['[0.5, {"__float__": "Infinity"}]', "[0.5, Infinity]"])
def test_infinity_in_either_spelling(text: str) -> None:
    config = ModelConfig.from_mapping(MAMBA2 | {"time_step_limit": json.loads(text)})
    shape = config.shapes[MixerKind.MAMBA2]
    assert isinstance(shape, Mamba2Shape)
    assert shape.dt_limit == (0.5, math.inf)


@pytest.mark.parametrize(
    ("base", "keys", "message"),
    [
        (MAMBA2, {"n_groups": 3}, "n_groups: expected a divisor of 8 heads, got 3"),
        (MAMBA2, {"expand": 3}, r"expand: expected num_heads \* head_dim / hidden_size .* got 3"),
        (MAMBA2, {"state_size": 257}, r"state_size: expected an integer in 1\.\.256, got 257"),
        (MAMBA2, {"conv_kernel": 7}, r"conv_kernel: expected an integer in 2\.\.6, got 7"),
        (MAMBA2, {"use_bias": 1}, "use_bias: expected true or false, got 1"),
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        (MAMBA2, {"time_step_limit": [0.1]}, "time_step_limit: expected two numbers"),
        (MAMBA2, {"time_step_limit": ["0", 1]}, "time_step_limit: expected two numbers"),
        (MAMBA2, {"time_step_limit": [2, 1]}, "time_step_limit: expected 0 <= least <= greatest"),
        (MAMBA2, {"time_step_limit": [math.nan, 1]}, "time_step_limit: expected 0 <= least <= greatest"),
        (
            MAMBA2,
            {"time_step_limit": [0, 10**400]},
            "time_step_limit: expected 0 <= least <= greatest, numbers that fp32",
        ),
        (MAMBA2, {"time_step_limit": [10**400, math.inf]}, "time_step_limit: expected 0 <= least <= greatest"),
        (MAMBA2, {"time_step_limit": [0, 3.5e38]}, "time_step_limit: expected 0 <= least <= greatest"),
        (MAMBA2, {"layer_norm_epsilon": 10**400}, "layer_norm_epsilon: expected a positive number that fp32 holds"),
        (NEMOTRON, {"time_step_min": 3.5e38}, "time_step_min: expected a positive number that fp32 holds, or 0, got"),
        (NEMOTRON, {"time_step_min": False}, "time_step_min: expected a positive number that fp32 holds, or 0, got"),
        (MAMBA2, {"layer_norm_epsilon": 0}, "layer_norm_epsilon: expected a positive number that fp32 holds, got 0"),
        (NEMOTRON, {"layers_block_type": ["M", "conv"]}, r"layers_block_type: expected 1\.\.4096 of "),
        (NEMOTRON, {"layers_block_type": []}, r"layers_block_type: expected 1\.\.4096 of "),
        (NEMOTRON, {"layers_block_type": [["M"]]}, r"layers_block_type: expected 1\.\.4096 of "),
        (NEMOTRON, {"layers_block_type": None}, r"layers_block_type: expected .* got None"),
        (NEMOTRON, {"mamba_hidden_act": "relu2"}, "mamba_hidden_act: expected 'silu', got 'relu2'"),
    ],
)
def test_refused_by_name(base: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_mapping(base | keys)


def test_groups_are_dealt_out_or_refused() -> None:
    shape = ModelConfig.from_mapping(NEMOTRON).shapes[MixerKind.MAMBA2]
    assert shape.shard(2) == Mamba2Shape(2, 4, 32, 12, 4, 2, (0.001, math.inf), has_conv_bias=True, has_bias=False)
    assert shape.shard(8) == Mamba2Shape(1, 1, 32, 12, 4, 1, (0.001, math.inf), has_conv_bias=True, has_bias=False)
    with pytest.raises(ModelError, match="--tensor-parallel: expected a divisor or a multiple of 4 groups, got 3"):
        shape.shard(3)
    with pytest.raises(ModelError, match="--tensor-parallel: expected a divisor of 8 heads, got 16"):
        shape.shard(16)
    uneven = Mamba2Shape(4, 8, 32, 12, 4, 3, (0.001, math.inf), has_conv_bias=True, has_bias=False)
    with pytest.raises(ModelError, match="expected a divisor or a multiple of 3 groups of the mixer's norm, got 2"):
        uneven.shard(2)
