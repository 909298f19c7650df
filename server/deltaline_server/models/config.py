"""What a checkpoint's config.json says about its layers: kinds, shapes, constants, read as transformers reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import MAX_FLOAT, ConfigReader, ModelError, read_json_object
from deltaline_server.errors import shown
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape, Mamba2Shape, MixerShape
from deltaline_server.layers.streams import StreamConfig, stream_config

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 4096
MAX_SIZE = 1 << 20
MAX_HEADS = 4096
MAX_POSITIONS = 1 << 24
# What may stand beside the rope type. The sections are those of three-dimensional positions (mrope): of text, all three
# positions are the token's, and rotate as one does.
ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
DTYPES = ("float32", "bfloat16", "float16")


class Scope(StrEnum):
    """What a served layer computes."""

    MIXER = "mixer"
    """Hidden states in, the mixer's output out."""
    BLOCK = "block"
    """The whole layer, as the checkpoint's model does: norm, mixer, residual, and then norm, MLP, residual if it has
    an MLP."""


class MixerKind(StrEnum):
    """What mixes the tokens of a layer."""

    GATED_DELTA_NET = "gated_delta_net"
    MAMBA2 = "mamba2"
    ATTENTION = "attention"


class MlpKind(StrEnum):
    """What computes on each token of a layer by itself."""

    DENSE = "dense"
    MIXTURE_OF_EXPERTS = "mixture_of_experts"


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: its number in the checkpoint and its parts; None where it has no such part."""

    index: int
    mixer: MixerKind | None
    mlp: MlpKind | None


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's language model.

    intermediate_size: of dense MLPs. dtype: the one that the checkpoint was written for, None where it names none.
    shapes: of its mixers, by kind; of a kind that can't be served there is none, and unserved may say why.
    residual_in_fp32: whether the sums of blocks are kept in fp32 from layer to layer. streams: its hyper-connections,
    None where it has one plain residual.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    dtype: str | None
    shapes: Mapping[MixerKind, MixerShape]
    layers: tuple[LayerConfig, ...]
    residual_in_fp32: bool = False
    unserved: Mapping[MixerKind, str] = field(default_factory=dict)
    streams: StreamConfig | None = None

    @property
    def interleaves_projections(self) -> bool:
        """Whether the input projections are stored as qkvz and ba, each interleaved by key head."""
        return self.model_type == "qwen3_next"

    @property
    def has_mlp_blocks(self) -> bool:
        """Whether a layer with a mixer has an MLP as well."""
        return any(layer.mixer is not None and layer.mlp is not None for layer in self.layers)

    def meaning(self) -> dict[str, Any]:
        """What of it decides what a state means, as JSON values: all but how long sequences may be, and words."""
        values = asdict(self)
        values.pop("unserved")
        for shape in values["shapes"].values():
            shape.pop("max_positions", None)
        return values

    def with_context(self, max_context: int) -> ModelConfig:
        """Limit the tokens of a sequence; 0 for as many as the checkpoint was made for, which is the most.

        Raises ModelError beyond that. Without attention there is no limit, and nothing changes.
        """
        shape = self.shapes.get(MixerKind.ATTENTION)
        if not max_context or not isinstance(shape, AttentionShape):
            return self
        if max_context > shape.max_positions:
            raise ModelError(
                f"--max-context: expected at most {shape.max_positions} (max_position_embeddings), got {max_context}"
            )
        shape = replace(shape, max_positions=max_context)
        return replace(self, shapes={**self.shapes, MixerKind.ATTENTION: shape})

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read `config.json` of a model directory. Raises ModelError."""
        return cls.from_file(directory / CONFIG_FILE)

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read a config.json. Raises ModelError when it is missing, too large, no JSON object, or not servable."""
        return cls.from_mapping(read_json_object(path, MAX_CONFIG_BYTES))

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the parsed config. Raises ModelError naming the key."""
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in _READERS:
            raise ModelError(f"model_type: expected one of {', '.join(_READERS)}, got {shown(model_type)}")
        if "quantization_config" in raw:
            raise ModelError("quantization_config: expected none (quantised weights are not served)")
        nested, read = _READERS[model_type]
        config = ConfigReader(raw.get(nested), f"{nested}.") if nested else ConfigReader(raw, "")
        return replace(read(model_type, config, _dtype(config, raw)), streams=stream_config(config))


def _qwen(model_type: str, config: ConfigReader, dtype: str | None) -> ModelConfig:
    config.require("hidden_act", "silu", default="silu")
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    mixers = _mixers(config, num_layers)
    shapes: dict[MixerKind, MixerShape] = {}
    unserved = {}
    if MixerKind.GATED_DELTA_NET in mixers:
        shapes[MixerKind.GATED_DELTA_NET] = gated_delta_net_shape(config)
    if MixerKind.ATTENTION in mixers:
        try:
            shapes[MixerKind.ATTENTION] = attention_shape(config, num_kv_heads=2 if model_type == "qwen3_next" else 4)
        except ModelError as error:  # its other layers can be served all the same
            unserved[MixerKind.ATTENTION] = str(error)
    mlps = _mlps(config, num_layers) if model_type == "qwen3_next" else (MlpKind.DENSE,) * num_layers
    return ModelConfig(
        model_type=model_type,
        hidden_size=config.integer("hidden_size", 1, MAX_SIZE),
        intermediate_size=config.integer("intermediate_size", 1, MAX_SIZE),
        rms_norm_eps=config.positive("rms_norm_eps"),
        dtype=dtype,
        shapes=shapes,
        layers=tuple(LayerConfig(*layer) for layer in zip(range(num_layers), mixers, mlps, strict=True)),
        unserved=unserved,
    )


def _mamba2(model_type: str, config: ConfigReader, dtype: str | None) -> ModelConfig:
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    num_heads, head_dim = config.integer("num_heads", 1, MAX_LAYERS), config.integer("head_dim", 1, MAX_HEAD_DIM)
    if config.integer("expand", 1, MAX_LAYERS, default=2) * hidden_size != num_heads * head_dim:
        raise config.fail("expand", f"num_heads * head_dim / hidden_size ({num_heads} * {head_dim} / {hidden_size})")
    shape = Mamba2Shape(
        num_key_heads=value_groups(config, num_heads),
        num_value_heads=num_heads,
        value_dim=head_dim,
        key_dim=config.integer("state_size", 1, MAX_HEAD_DIM, default=128),
        conv_width=config.integer("conv_kernel", MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=4),
        norm_groups=1,
        dt_limit=time_step_limits(config),
        has_conv_bias=config.flag("use_conv_bias", default=True),
        has_bias=config.flag("use_bias", default=False),
    )
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=0,
        rms_norm_eps=config.positive("layer_norm_epsilon", default=1e-5),
        dtype=dtype,
        shapes={MixerKind.MAMBA2: shape},
        layers=tuple(
            LayerConfig(i, MixerKind.MAMBA2, None) for i in range(config.integer("num_hidden_layers", 1, MAX_LAYERS))
        ),
        residual_in_fp32=config.flag("residual_in_fp32", default=True),
    )


def _nemotron_h(model_type: str, config: ConfigReader, dtype: str | None) -> ModelConfig:
    config.require("mamba_hidden_act", "silu", default="silu")
    num_heads = config.integer("mamba_num_heads", 1, MAX_LAYERS)
    groups = value_groups(config, num_heads, _spelling(config, "mamba_n_groups", "n_groups"))
    shape = Mamba2Shape(
        num_key_heads=groups,
        num_value_heads=num_heads,
        value_dim=config.integer("mamba_head_dim", 1, MAX_HEAD_DIM),
        key_dim=config.integer("ssm_state_size", 1, MAX_HEAD_DIM, default=128),
        conv_width=config.integer(
            _spelling(config, "mamba_d_conv", "conv_kernel"), MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=4
        ),
        norm_groups=groups,
        # The checkpoint's model takes time_step_min for the least time step, and has no greatest one.
        dt_limit=(config.positive(_spelling(config, "mamba_dt_min", "time_step_min"), default=0.001), math.inf),
        has_conv_bias=config.flag(_spelling(config, "mamba_conv_bias", "use_conv_bias"), default=True),
        has_bias=config.flag("use_bias", default=False),
    )
    return ModelConfig(
        model_type=model_type,
        hidden_size=config.integer("hidden_size", 1, MAX_SIZE),
        intermediate_size=config.integer("intermediate_size", 1, MAX_SIZE),
        rms_norm_eps=config.positive("layer_norm_epsilon", default=1e-5),
        dtype=dtype,
        shapes={MixerKind.MAMBA2: shape},
        layers=_nemotron_layers(config),
    )


# model_type -> the key that nests the language model's config ("" where it is the config itself), and who reads it.
_READERS: dict[str, tuple[str, Callable[[str, ConfigReader, str | None], ModelConfig]]] = {
    "qwen3_next": ("", _qwen),
    "qwen3_5": ("text_config", _qwen),
    "qwen3_5_text": ("", _qwen),
    "mamba2": ("", _mamba2),
    "nemotron_h": ("", _nemotron_h),
}
_LAYER_TYPES = {"linear_attention": MixerKind.GATED_DELTA_NET, "full_attention": MixerKind.ATTENTION}
# A layer of Nemotron-H has one part: as its config lists them, in its old spelling, and as letters of a pattern.
_MAMBA, _ATTENTION = (MixerKind.MAMBA2, None), (MixerKind.ATTENTION, None)
_DENSE, _EXPERTS = (None, MlpKind.DENSE), (None, MlpKind.MIXTURE_OF_EXPERTS)
_NEMOTRON_LAYERS: dict[str, tuple[MixerKind | None, MlpKind | None]] = {
    "linear_attention": _MAMBA,
    "full_attention": _ATTENTION,
    "mamba": _MAMBA,
    "attention": _ATTENTION,
    "mlp": _DENSE,
    "moe": _EXPERTS,
    "M": _MAMBA,
    "*": _ATTENTION,
    "-": _DENSE,
    "E": _EXPERTS,
}


def _nemotron_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """The layers: `layers_block_type`, or the letters of `hybrid_override_pattern`."""
    key = "layers_block_type" if config.get("layers_block_type") is not None else "hybrid_override_pattern"
    types = config.get(key)
    is_known = isinstance(types, list | str) and all(
        isinstance(kind, str) and kind in _NEMOTRON_LAYERS for kind in types
    )
    if not is_known or not 1 <= len(types) <= MAX_LAYERS:
        raise config.fail(key, f"1..{MAX_LAYERS} of {', '.join(_NEMOTRON_LAYERS)}")
    return tuple(LayerConfig(i, *_NEMOTRON_LAYERS[kind]) for i, kind in enumerate(types))


def _spelling(config: ConfigReader, old: str, new: str) -> str:
    """The key to read: the old one where there is one, as it overrides the new one in the checkpoint's model."""
    return new if config.get(old) is None else old


def _mixers(config: ConfigReader, num_layers: int) -> tuple[MixerKind, ...]:
    """The mixer of each layer: `layer_types`, or every full_attention_interval-th is attention."""
    types = config.get("layer_types")
    if types is None:
        interval = config.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
        return tuple(
            MixerKind.GATED_DELTA_NET if (i + 1) % interval else MixerKind.ATTENTION for i in range(num_layers)
        )
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(_LAYER_TYPES) for kind in types):
        raise config.fail("layer_types", f"{num_layers} of {', '.join(_LAYER_TYPES)}")
    return tuple(_LAYER_TYPES[kind] for kind in types)


def _mlps(config: ConfigReader, num_layers: int) -> tuple[MlpKind, ...]:
    """The MLP of each layer; absent keys mean what they mean to the checkpoint's model."""
    dense = config.get("mlp_only_layers")
    if dense is None:
        dense = []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise config.fail("mlp_only_layers", "a list of layer numbers")
    num_experts = config.integer("num_experts", 0, MAX_SIZE, default=512)
    step = config.integer("decoder_sparse_step", 1, MAX_SIZE, default=1)
    return tuple(
        MlpKind.DENSE if i in dense or num_experts == 0 or (i + 1) % step else MlpKind.MIXTURE_OF_EXPERTS
        for i in range(num_layers)
    )


def _dtype(config: ConfigReader, raw: Mapping[str, Any]) -> str | None:
    """The dtype that the config names, under its new or its old key, nested or not."""
    named = config.get("dtype") or config.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype")
    if named is not None and named not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {shown(named)}")
    return named


def gated_delta_net_shape(config: ConfigReader) -> GatedDeltaNetShape:
    """Read the sizes of Gated DeltaNet mixers. Raises ModelError naming the key."""
    shape = GatedDeltaNetShape(
        num_key_heads=config.integer("linear_num_key_heads", 1, MAX_HEADS),
        num_value_heads=config.integer("linear_num_value_heads", 1, MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=config.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv_width=config.integer("linear_conv_kernel_dim", MIN_CONV_WIDTH, MAX_CONV_WIDTH),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise config.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.num_key_heads})")
    return shape


def attention_shape(config: ConfigReader, num_kv_heads: int) -> AttentionShape:
    """Read the sizes of gated attention mixers. num_kv_heads: where the config says nothing.

    Raises ModelError naming the key, also of a kind of rotary embedding that is not served.
    """
    heads = config.integer("num_attention_heads", 1, MAX_HEADS, default=16)
    kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, default=num_kv_heads)
    if heads % kv_heads:
        raise config.fail("num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})")
    head_dim = config.integer("head_dim", 1, MAX_HEAD_DIM, default=256)
    rotary_dim, theta = _rotary(config, head_dim)
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        max_positions=config.integer("max_position_embeddings", 1, MAX_POSITIONS, default=32768),
        has_bias=config.flag("attention_bias", default=False),
    )


def _rotary(config: ConfigReader, head_dim: int) -> tuple[int, float]:
    """Channels that are rotated, and the base of their wavelengths.

    As `rope_scaling` says, else `rope_parameters`, else the config itself.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.nested(name) if config.get(name) else ConfigReader({}, "")
    kind = "rope_type" if rope.get("rope_type") is not None else "type"
    rope.require(kind, "default", default="default")
    rope.only(ROPE_KEYS)
    theta = rope if rope.get("rope_theta") is not None else config
    factor = rope if rope.get("partial_rotary_factor") is not None else config
    share = factor.positive("partial_rotary_factor", default=0.25)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise factor.fail("partial_rotary_factor", f"an even number of rotated channels in 2..{head_dim}")
    return rotary_dim, theta.positive("rope_theta", default=10000.0)


def value_groups(config: ConfigReader, num_heads: int, key: str = "n_groups") -> int:
    """Read the groups of Mamba2 heads that share B and C. Raises ModelError naming the key."""
    groups = config.integer(key, 1, MAX_HEADS, default=8)
    if num_heads % groups:
        raise config.fail(key, f"a divisor of {num_heads} heads")
    return groups


def time_step_limits(config: ConfigReader) -> tuple[float, float]:
    """Read the least and the greatest time step of Mamba2. Raises ModelError naming the key.

    JSON has no infinity: it is written in an object, or as Python does.
    """
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise config.fail("time_step_limit", "two numbers")
    least, greatest = (math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits)
    if not all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in (least, greatest)):
        raise config.fail("time_step_limit", "two numbers")
    if not (0 <= least <= MAX_FLOAT and least <= greatest and (greatest <= MAX_FLOAT or greatest == math.inf)):
        raise config.fail("time_step_limit", "0 <= least <= greatest, numbers that fp32 holds or infinity")
    return float(least), float(greatest)
