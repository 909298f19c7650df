"""The configs of Mamba-1 models and of Jamba: what is read of them."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.small_models import JAMBA, MAMBA1

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.shapes import AttentionShape, Mamba1Shape
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.parts import LayerConfig, MixerKind, MlpKind

SCAN: dict[str, Any] = {"step_rank": 6, "norm_eps": 0.0, "has_norm_weights": False}


def test_mamba() -> None:
    config = ModelConfig.from_mapping(MAMBA1)
    shape = config.shapes[MixerKind.MAMBA1]
    assert isinstance(shape, Mamba1Shape)
    assert shape == Mamba1Shape(1, 8, 16, 16, 4, has_conv_bias=True, has_bias=False, **SCAN)
    assert (shape.conv_channels, shape.state, shape.record) == (128, (8, 16, 16), 16 + 2 * 128)
    assert config.layers == tuple(LayerConfig(i, MixerKind.MAMBA1, None) for i in range(2))
    assert (config.rms_norm_eps, config.residual_in_fp32, config.has_mlp_blocks) == (1e-5, True, False)


@pytest.mark.parametrize(("hidden", "rank"), [(64, 4), (65, 5)])
@pytest.mark.parametrize("said", [{"time_step_rank": "auto"}, {}])
def test_a_rank_that_is_not_said_is_a_16th_of_the_hidden_size(hidden: int, rank: int, said: dict[str, Any]) -> None:
    raw = {key: value for key, value in MAMBA1.items() if key != "time_step_rank"} | {"hidden_size": hidden} | said
    shape = ModelConfig.from_mapping(raw).shapes[MixerKind.MAMBA1]
    assert isinstance(shape, Mamba1Shape) and shape.step_rank == rank
    assert shape.value_channels == 2 * hidden and shape.value_dim == (16 if hidden == 64 else 2)


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_channels_that_are_said_count_alone(model_type: str) -> None:
    """Falcon-Mamba's config says to expand 4,096 channels 16 times, and has 8,192: as of transformers these count."""
    raw = MAMBA1 | {"model_type": model_type, "expand": 16, "intermediate_size": 96}
    shape = ModelConfig.from_mapping(raw).shapes[MixerKind.MAMBA1]
    assert isinstance(shape, Mamba1Shape) and shape.value_channels == 96
    with pytest.raises(ModelError, match="intermediate_size: expected"):
        ModelConfig.from_mapping(raw | {"intermediate_size": 0})


def test_falcon_mamba_has_norms_without_weights() -> None:
    shape = ModelConfig.from_mapping(MAMBA1 | {"model_type": "falcon_mamba"}).shapes[MixerKind.MAMBA1]
    assert isinstance(shape, Mamba1Shape) and (shape.norm_eps, shape.has_norm_weights) == (1e-6, False)


def test_jamba() -> None:
    raw = JAMBA | {"num_hidden_layers": 4, "attn_layer_period": 3, "expert_layer_period": 2, "expert_layer_offset": 0}
    config = ModelConfig.from_mapping(raw)
    scan, attention = (config.shapes[kind] for kind in (MixerKind.MAMBA1, MixerKind.ATTENTION))
    assert isinstance(scan, Mamba1Shape) and (scan.norm_eps, scan.has_norm_weights) == (1e-6, True)
    assert isinstance(attention, AttentionShape) and attention.rotary_dim == 0 and not attention.is_gated
    assert [layer.mixer for layer in config.layers] == [
        MixerKind.ATTENTION if i % 3 == 1 else MixerKind.MAMBA1 for i in range(4)
    ]
    assert [layer.mlp for layer in config.layers] == [MlpKind.MIXTURE_OF_EXPERTS, MlpKind.DENSE] * 2
    assert config.experts is not None and config.experts.num_shared == 0 and not config.experts.normalises
    dense = ModelConfig.from_mapping(raw | {"num_experts": 1})
    assert {layer.mlp for layer in dense.layers} == {MlpKind.DENSE} and dense.experts is None


def test_of_jamba_s_two_spellings_of_a_number_of_experts_that_counts_which_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    both = {"num_experts": 1, "num_local_experts": 4}
    experts = ModelConfig.from_mapping(JAMBA | both).experts
    assert experts is not None and experts.num_experts == transformers.JambaConfig(**both).num_experts == 4


def test_one_rank_s_share() -> None:
    shape = ModelConfig.from_mapping(MAMBA1).shapes[MixerKind.MAMBA1]
    assert shape.shard(4) == Mamba1Shape(1, 2, 16, 16, 4, has_conv_bias=True, has_bias=False, **SCAN)
    with pytest.raises(ModelError, match="--tensor-parallel: expected a divisor of 8 heads of 16 channels, got 3"):
        shape.shard(3)
