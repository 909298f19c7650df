"""What is read from config.json, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.expert_shape import ExpertsShape
from deltaline_server.layers.shapes import GatedDeltaNetShape
from deltaline_server.models.config import ModelConfig
from deltaline_server.models.parts import MixerKind, MlpKind

CONFIGS = Path(__file__).with_name("configs")
TEXT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
NEXT = {"model_type": "qwen3_next", "num_experts": 0, **TEXT}
ATTENTION, LINEAR = MixerKind.ATTENTION, MixerKind.GATED_DELTA_NET
DENSE, MOE = MlpKind.DENSE, MlpKind.MIXTURE_OF_EXPERTS


def test_shapes_are_read() -> None:
    config = ModelConfig.from_mapping(NEXT)
    shape = config.shapes[LINEAR]
    assert isinstance(shape, GatedDeltaNetShape)
    assert (config.hidden_size, config.intermediate_size, config.rms_norm_eps) == (1024, 3072, 1e-6)
    assert shape == GatedDeltaNetShape(4, 8, 64, 32, 4)
    assert (shape.key_channels, shape.value_channels, shape.conv_channels) == (256, 256, 768)


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("qwen3_next", "Qwen3NextConfig"),
        ("qwen3_5_text", "Qwen3_5TextConfig"),
        ("qwen3_5_moe_text", "Qwen3_5MoeTextConfig"),
    ],
)
def test_sizes_of_qwen_s_mixers_that_are_not_said_are_those_of_transformers(model_type: str, named: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    raw = {key: value for key, value in NEXT.items() if not key.startswith("linear_")} | {"model_type": model_type}
    theirs = getattr(transformers, named)()
    assert ModelConfig.from_mapping(raw).shapes[LINEAR] == GatedDeltaNetShape(
        theirs.linear_num_key_heads,
        theirs.linear_num_value_heads,
        theirs.linear_key_head_dim,
        theirs.linear_value_head_dim,
        theirs.linear_conv_kernel_dim,
    )


def test_the_language_model_of_qwen3_5_is_nested() -> None:
    config = ModelConfig.from_mapping({"model_type": "qwen3_5", "text_config": TEXT, "hidden_size": 1})
    assert config.hidden_size == 1024


@pytest.mark.parametrize("beside", [{}, {"text_config": None}], ids=["no-key", "null"])
def test_the_language_model_of_glm5_next_may_be_flat(beside: dict[str, Any]) -> None:
    """That of Qwen3.5 may not: transformers passes over what stands there."""
    text = json.loads((CONFIGS / "glm-5.3-flash.json").read_text())
    nested = ModelConfig.from_mapping({"model_type": "glm5_next", "text_config": text})
    assert ModelConfig.from_mapping(text | {"model_type": "glm5_next"} | beside) == nested
    with pytest.raises(ModelError, match=r"^text_config: expected an object, got None$"):
        ModelConfig.from_mapping({"model_type": "qwen3_5", **TEXT} | beside)


@pytest.mark.parametrize(
    ("keys", "mixers"),
    [
        ({}, [LINEAR, LINEAR, LINEAR, ATTENTION]),
        ({"full_attention_interval": 2}, [LINEAR, ATTENTION, LINEAR, ATTENTION]),
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 3}, [ATTENTION, LINEAR, LINEAR, LINEAR]),
    ],
    ids=["every-fourth", "interval", "named"],
)
def test_mixers_of_the_layers(keys: dict[str, Any], mixers: list[MixerKind]) -> None:
    assert [layer.mixer for layer in ModelConfig.from_mapping(NEXT | keys).layers] == mixers


@pytest.mark.parametrize(
    ("keys", "mlps"),
    [
        ({}, [DENSE] * 4),
        ({"num_experts": 8}, [MOE] * 4),
        ({"num_experts": 8, "decoder_sparse_step": 2}, [DENSE, MOE, DENSE, MOE]),
        ({"num_experts": 8, "mlp_only_layers": [1, 2]}, [MOE, DENSE, DENSE, MOE]),
        ({"num_experts": 8, "mlp_only_layers": None}, [MOE] * 4),
    ],
    ids=["no-experts", "experts", "sparse-step", "dense-layers", "null"],
)
def test_mlps_of_the_layers(keys: dict[str, Any], mlps: list[MlpKind]) -> None:
    assert [layer.mlp for layer in ModelConfig.from_mapping(NEXT | keys).layers] == mlps


def test_experts_are_the_default_of_qwen3_next_and_unknown_to_qwen3_5() -> None:
    without = {key: value for key, value in NEXT.items() if key != "num_experts"}
    assert ModelConfig.from_mapping(without).layers[0].mlp is MOE
    assert ModelConfig.from_mapping(without | {"model_type": "qwen3_5_text"}).layers[0].mlp is DENSE


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [(NEXT, None), (NEXT | {"dtype": "bfloat16"}, "bfloat16"), (NEXT | {"torch_dtype": "float16"}, "float16")],
    ids=["unnamed", "new-key", "old-key"],
)
def test_dtype(raw: dict[str, Any], dtype: str | None) -> None:
    assert ModelConfig.from_mapping(raw).dtype == dtype


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "llama"}, "model_type: expected one of qwen3_next.*'llama'"),
        ({"model_type": None}, "model_type: .*None"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"hidden_size": "big"}, "hidden_size: expected an integer .*'big'"),
        ({"hidden_size": True}, "hidden_size: .*True"),
        ({"hidden_size": 1 << 40}, "hidden_size: .*1099511627776"),
        (
            {"linear_num_value_heads": 6},
            "linear_num_value_heads: expected a multiple of linear_num_key_heads .4., got 6",
        ),
        ({"linear_conv_kernel_dim": 7}, r"linear_conv_kernel_dim: expected an integer in 2\.\.6, got 7"),
        ({"linear_key_head_dim": 512}, r"linear_key_head_dim: expected an integer in 1\.\.256, got 512"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive number that fp32 holds, got 0"),
        ({"rms_norm_eps": 1e-46}, "rms_norm_eps: expected a positive number that fp32 holds, got 1e-46"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types: expected 4 of"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: expected 4 of linear_attention, full_attention, got .*mamba"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: expected a list of layer numbers, got 3"),
        ({"dtype": "float64"}, "dtype: expected one of .*'float64'"),
        ({"quantization_config": {}}, "quantization_config.quant_method: expected 'fp8' .*, got nothing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_mapping(NEXT | keys)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_key_is_named(key: str) -> None:
    text = {name: value for name, value in TEXT.items() if name != key}
    with pytest.raises(ModelError, match=rf"^text_config\.{key}: expected .*, got nothing$"):
        ModelConfig.from_mapping({"model_type": "qwen3_5", "text_config": text})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^config\.json: can't be read"),
        (b"[]", r"^config\.json: expected a JSON object"),
        (b"{", r"^config\.json: expected JSON"),
        (b"\xff", r"^config\.json: expected JSON"),
        (b"[" * 100_000, r"^config\.json: expected JSON"),
        (b" " * ((16 << 20) + 1), r"^config\.json: expected at most 16777216 bytes"),
    ],
    ids=["missing", "array", "cut", "binary", "deep", "large"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEXT))
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_mapping(NEXT)


def test_heads_are_dealt_out_or_refused() -> None:
    shape = ModelConfig.from_mapping(NEXT).shapes[LINEAR]
    assert shape.shard(2) == GatedDeltaNetShape(2, 4, 64, 32, 4)
    with pytest.raises(ModelError, match="--tensor-parallel: expected a divisor of 4 key heads, got 3"):
        shape.shard(3)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_experts": 12, "num_experts_per_tok": 3},
        {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        {"norm_topk_prob": False},
    ],
    ids=["defaults", "numbers", "sizes", "as-they-are"],
)
def test_experts_are_those_of_transformers(model_type: str, keys: dict[str, Any]) -> None:
    """Absent keys mean what they mean there; and Qwen3.5 does not ask whether weights are divided by their sum."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: it is the oracle")
    raw = {key: value for key, value in NEXT.items() if key != "num_experts"} | {"model_type": model_type} | keys
    is_next = model_type == "qwen3_next"
    theirs = (transformers.Qwen3NextConfig if is_next else transformers.Qwen3_5MoeTextConfig)(**TEXT | keys)
    assert ModelConfig.from_mapping(raw).experts == ExpertsShape(
        theirs.num_experts,
        theirs.num_experts_per_tok,
        theirs.moe_intermediate_size,
        theirs.shared_expert_intermediate_size,
        normalises=theirs.norm_topk_prob if is_next else True,
    )


def test_a_state_means_the_same_as_before_there_were_experts() -> None:
    assert "experts" not in ModelConfig.from_mapping(NEXT).meaning()
    assert ModelConfig.from_mapping(NEXT | {"num_experts": 12}).meaning()["experts"]["num_experts"] == 12


@pytest.mark.parametrize("size", [{}, {"weight_block_size": None}])
def test_of_quantised_weights_the_size_of_blocks_that_a_config_says_is_all_that_decides(size: dict[str, Any]) -> None:
    raw = NEXT | {"quantization_config": {"quant_method": "fp8", **size}}
    assert ModelConfig.from_mapping(raw).meaning()["quantization"] == {"weight_block_size": None}
