"""What a checkpoint's config.json says about its layers: kinds, shapes, constants.

Reads the config of a Hugging Face model directory. Knows no tensor, and not which layers are served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_LAYERS = 4096
MAX_SIZE = 1 << 20
# model_type -> the key that nests the language model's config, "" where it is the config itself.
MODEL_TYPES = {"qwen3_next": "", "qwen3_5": "text_config", "qwen3_5_text": ""}
DTYPES = ("float32", "bfloat16", "float16")


class ModelError(ValueError):
    """The model, or an adapter of it, can't be served as asked.

    The message names what is at fault, what was expected, what was got.
    """


class Scope(StrEnum):
    """What a served layer computes."""

    MIXER = "mixer"
    """Hidden states in, the mixer's output out."""
    BLOCK = "block"
    """Norm, mixer, residual, norm, MLP, residual, as the checkpoint's model does."""


class MixerKind(StrEnum):
    """The token-mixing half of a layer; the values of `layer_types`."""

    GATED_DELTA_NET = "linear_attention"
    ATTENTION = "full_attention"


class MlpKind(StrEnum):
    """The other half of a layer."""

    DENSE = "dense"
    MIXTURE_OF_EXPERTS = "mixture_of_experts"


@dataclass(frozen=True)
class GatedDeltaNetShape:
    """Sizes of a Gated DeltaNet mixer, of the whole layer or of one rank's share."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        """Channels of all keys, H * K; queries have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values, HV * V."""
        return self.num_value_heads * self.value_dim

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, D = 2 * H * K + HV * V: q | k | v."""
        return 2 * self.keys + self.values

    def shard(self, world_size: int) -> GatedDeltaNetShape:
        """Return one rank's share: whole key heads and their value heads. Raises ModelError if that can't be done."""
        if self.num_key_heads % world_size:
            raise ModelError(f"world_size: expected a divisor of {self.num_key_heads} key heads, got {world_size}")
        return replace(
            self,
            num_key_heads=self.num_key_heads // world_size,
            num_value_heads=self.num_value_heads // world_size,
        )


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: its number in the checkpoint and its halves."""

    index: int
    mixer: MixerKind
    mlp: MlpKind


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's language model. dtype is the one that the checkpoint was written for, None where it names none."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    dtype: str | None
    gated_delta_net: GatedDeltaNetShape
    layers: tuple[LayerConfig, ...]

    @property
    def interleaves_projections(self) -> bool:
        """Whether the input projections are stored as qkvz and ba, each interleaved by key head."""
        return self.model_type == "qwen3_next"

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
        if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
            raise ModelError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {shown(model_type)}")
        if "quantization_config" in raw:
            raise ModelError("quantization_config: expected none (quantised weights are not served)")
        nested = MODEL_TYPES[model_type]
        keys = Keys(raw.get(nested), f"{nested}.") if nested else Keys(raw, "")
        keys.require("hidden_act", "silu", default="silu")
        num_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
        mixers = _mixers(keys, num_layers)
        mlps = _mlps(keys, num_layers) if model_type == "qwen3_next" else (MlpKind.DENSE,) * num_layers
        return cls(
            model_type=model_type,
            hidden_size=keys.integer("hidden_size", 1, MAX_SIZE),
            intermediate_size=keys.integer("intermediate_size", 1, MAX_SIZE),
            rms_norm_eps=keys.positive("rms_norm_eps"),
            dtype=_dtype(keys, raw),
            gated_delta_net=_gated_delta_net(keys),
            layers=tuple(LayerConfig(*layer) for layer in zip(range(num_layers), mixers, mlps, strict=True)),
        )


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most `max_bytes`. Raises ModelError naming the file, without its folders."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path.name}: expected at most {max_bytes} bytes, got {size}")
        return parse_json_object(path.read_bytes(), path.name)
    except OSError as error:
        raise ModelError(f"{path.name}: can't be read ({error.strerror})") from error


def parse_json_object(text: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ModelError naming it by `name`."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: expected JSON, got something else ({error})") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{name}: expected a JSON object, got {shown(parsed)}")
    return parsed


class Keys:
    """Typed access to the keys of a config; `prefix` is what messages put before a key."""

    def __init__(self, values: object, prefix: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{prefix.rstrip('.')}: expected an object, got {shown(values)}")
        self._values = values
        self._prefix = prefix

    def get(self, key: str) -> Any:
        """The value, None where it is absent."""
        return self._values.get(key)

    def fail(self, key: str, expected: str) -> ModelError:
        """The error that `key` is not as expected."""
        got = shown(self._values[key]) if key in self._values else "nothing"
        return ModelError(f"{self._prefix}{key}: expected {expected}, got {got}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer in {low}..{high}")
        return value

    def positive(self, key: str) -> float:
        value = self._values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(key, "a positive number")
        return float(value)

    def require(self, key: str, expected: str, default: str) -> None:
        if self._values.get(key, default) != expected:
            raise self.fail(key, f"'{expected}'")


def _gated_delta_net(keys: Keys) -> GatedDeltaNetShape:
    shape = GatedDeltaNetShape(
        num_key_heads=keys.integer("linear_num_key_heads", 1, MAX_LAYERS),
        num_value_heads=keys.integer("linear_num_value_heads", 1, MAX_LAYERS),
        key_dim=keys.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=keys.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv_width=keys.integer("linear_conv_kernel_dim", MIN_CONV_WIDTH, MAX_CONV_WIDTH),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise keys.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.num_key_heads})")
    return shape


def _mixers(keys: Keys, num_layers: int) -> tuple[MixerKind, ...]:
    """The mixer of each layer: `layer_types`, or every full_attention_interval-th is attention."""
    types = keys.get("layer_types")
    if types is None:
        interval = keys.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
        return tuple(
            MixerKind.GATED_DELTA_NET if (i + 1) % interval else MixerKind.ATTENTION for i in range(num_layers)
        )
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(MixerKind) for kind in types):
        raise keys.fail("layer_types", f"{num_layers} of {', '.join(MixerKind)}")
    return tuple(MixerKind(kind) for kind in types)


def _mlps(keys: Keys, num_layers: int) -> tuple[MlpKind, ...]:
    """The MLP of each layer; absent keys mean what they mean to the checkpoint's model."""
    dense = keys.get("mlp_only_layers")
    if dense is None:
        dense = []
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise keys.fail("mlp_only_layers", "a list of layer numbers")
    num_experts = keys.integer("num_experts", 0, MAX_SIZE, default=512)
    step = keys.integer("decoder_sparse_step", 1, MAX_SIZE, default=1)
    return tuple(
        MlpKind.DENSE if i in dense or num_experts == 0 or (i + 1) % step else MlpKind.MIXTURE_OF_EXPERTS
        for i in range(num_layers)
    )


def _dtype(keys: Keys, raw: Mapping[str, Any]) -> str | None:
    """The dtype that the config names, under its new or its old key, nested or not."""
    named = keys.get("dtype") or keys.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype")
    if named is not None and named not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {shown(named)}")
    return named


def shown(value: object) -> str:
    """A value for a message, cut short. It may be nested as deeply as JSON can be read."""
    try:
        text = repr(value)
    except RecursionError:  # there is less room here than there was when it was read
        text = "something nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
