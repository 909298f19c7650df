"""What a checkpoint's config.json says about its layers: kinds, shapes, constants, read as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.config_reader import ConfigReader, ModelError, read_json_object
from deltaline_server.checkpoints.fp8.quantization import Quantization
from deltaline_server.errors import shown
from deltaline_server.layers.expert_shape import SOFTMAX, ExpertsShape
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.shapes import MixerShape, PagedShape, QkNorm
from deltaline_server.layers.streams import StreamConfig, stream_config
from deltaline_server.models.families.family import Family
from deltaline_server.models.families.mamba import MAMBA_SSM
from deltaline_server.models.families.table import FAMILIES
from deltaline_server.models.keys.mlp import read_limit
from deltaline_server.models.keys.shared_blocks import SharedBlockKeys
from deltaline_server.models.parts import MAX_SIZE, LayerConfig, LayerKind, MixerKind, MlpKind

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 << 20
# What configs meant before these could say it: left out of what a state means, so that it is the same as then.
BEFORE: dict[str, Any] = {
    "experts": None,
    "has_mlp_bias": False,
    "residual_multiplier": 1.0,
    "has_shared_gate": True,
    "doubles_updates": False,
    "is_gated": True,
    "qk_norm": QkNorm.HEAD,
    "scale": None,
    "activation": Activation.SILU,
    "scoring": SOFTMAX,
    "num_groups": 1,
    "top_groups": 1,
    "weight_scale": 1.0,
    "has_out_bias": None,
    "norms_first": False,
    "input_scale": 1.0,
    "output_scale": 1.0,
    "section_scales": None,
    "mlp_scales": None,
    "shared_blocks": None,
    "quantization": None,
    "has_score_bias": True,
    "limit": 0.0,
    "mlp_limit": 0.0,
    "averages": False,
    "rope_scaling": None,
    "latent_size": None,
    "has_shared_bias": False,
}
DTYPES = ("float32", "bfloat16", "float16")


class Scope(StrEnum):
    """What a served layer computes."""

    MIXER = "mixer"
    """Hidden states in, the mixer's output out."""
    BLOCK = "block"
    """The whole layer, as the checkpoint's model does: norm, mixer, residual, and then norm, MLP, residual if it has
    an MLP."""


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's language model.

    intermediate_size: of dense MLPs; has_mlp_bias: whether they have biases. dtype: the one that the checkpoint was
    written for, None where it names none. shapes: of its mixers, by kind; of a kind that can't be served there is none,
    and unserved may say why. residual_in_fp32: whether the sums of blocks are kept in fp32 from layer to layer.
    streams: its hyper-connections, None where it has one plain residual. experts: of the layers that have them, None
    where there are none or they can't be served. residual_multiplier: of what a branch adds to the residual.
    mlp_scales: what gates of dense MLPs and their outputs are multiplied by, None where nothing. mlp_limit: of these
    gates and what they multiply, 0 for none. shared_blocks: how layers share blocks, None where they don't.
    quantization: of stored weights, None where there is none.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    dtype: str | None
    shapes: Mapping[MixerKind, MixerShape]
    layers: tuple[LayerConfig, ...]
    residual_in_fp32: bool = False
    unserved: Mapping[MixerKind | MlpKind, str] = field(default_factory=dict)
    streams: StreamConfig | None = None
    experts: ExpertsShape | None = None
    has_mlp_bias: bool = False
    residual_multiplier: float = 1.0
    mlp_scales: tuple[float, ...] | None = None
    mlp_limit: float = 0.0
    shared_blocks: SharedBlockKeys | None = None
    quantization: Quantization | None = None

    @property
    def family(self) -> Family:
        """What its model type says of all such checkpoints."""
        return FAMILIES[self.model_type]

    @property
    def has_mlp_blocks(self) -> bool:
        """Whether a layer with a mixer has an MLP as well."""
        return any(layer.mixer is not None and layer.mlp is not None for layer in self.layers)

    def meaning(self) -> dict[str, Any]:
        """What of it decides what a state means, as JSON values: all but how long sequences may be, and words."""
        values = asdict(self)
        values.pop("unserved")
        if values["quantization"] is not None:
            del values["quantization"]["left"], values["quantization"]["usual_block_size"]  # weights say it themselves
        for shape in values["shapes"].values():
            shape.pop("max_positions", None)
        for part in (values, values["experts"] or {}, values["streams"] or {}, *values["shapes"].values()):
            for name, before in BEFORE.items():
                if name in part and part[name] == before:
                    del part[name]
        return values

    def with_context(self, max_context: int) -> ModelConfig:
        """Limit the tokens of a sequence; 0 for as many as the checkpoint was made for, which is the most.

        Raises ModelError beyond that. Without attention there is no limit, and nothing changes.
        """
        paged = {kind: shape for kind, shape in self.shapes.items() if isinstance(shape, PagedShape)}
        for shape in paged.values():
            selected = shape.max_selected if isinstance(shape, LatentShape) else 0
            if 0 < selected < (max_context or shape.max_positions):
                raise ModelError(
                    f"--max-context: expected at most {selected} (index_topk), up to which its indexer selects all "
                    f"tokens, as sparse attention is not served, got {max_context or 'none'}"
                )
        if not max_context:
            return self
        for shape in paged.values():
            if max_context > shape.max_positions:
                most = f"{shape.max_positions} (max_position_embeddings)"
                raise ModelError(f"--max-context: expected at most {most}, got {max_context}")
        limited = {kind: replace(shape, max_positions=max_context) for kind, shape in paged.items()}
        return replace(self, shapes={**self.shapes, **limited})

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
        model_type = raw.get("model_type", MAMBA_SSM if "ssm_cfg" in raw else None)
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ModelError(f"model_type: expected one of {', '.join(FAMILIES)}, got {shown(model_type)}")
        family, quantization = FAMILIES[model_type], Quantization.read(raw)
        config = _language_model(raw, family)
        if family.activation is not None:
            config.require(family.activation, "silu", default="silu")
        if config.get("per_layer_config"):
            raise config.fail("per_layer_config", "none (layers of a kind are served alike)")
        layers = family.layers(config)
        shapes, unserved = _mixer_shapes(config, family, layers)
        if family.mlp_activation is not None:
            try:
                activation = family.blocks.mlp.activation
                config.require(family.mlp_activation, activation, default=activation)
            except ModelError as error:
                unserved[MlpKind.DENSE] = str(error)
        experts = None
        if family.experts is not None and any(layer.mlp is MlpKind.MIXTURE_OF_EXPERTS for layer in layers):
            try:
                experts = family.experts.read(config)
            except ModelError as error:
                unserved[MlpKind.MIXTURE_OF_EXPERTS] = str(error)  # their mixers can be served all the same
        streams, multiplier = stream_config(config, family.streams, averages=family.averages_streams), 1.0
        if family.residual_multiplier is not None:
            multiplier = config.positive(family.residual_multiplier, default=1.0)
        if streams is not None and not family.takes_streams:
            raise config.fail("hc_mult", f"none: {model_type} is served with one residual")
        return cls(
            model_type=model_type,
            hidden_size=config.integer(family.hidden, 1, MAX_SIZE),
            intermediate_size=_intermediate_size(config, family),
            rms_norm_eps=config.positive(family.eps, default=family.default_eps),
            dtype=_dtype(config, raw),
            shapes=shapes,
            layers=layers,
            residual_in_fp32=family.sums_in_fp32 and config.flag("residual_in_fp32", default=True),
            unserved=unserved,
            streams=streams,
            experts=experts,
            has_mlp_bias=family.mlp_bias is not None and config.flag(family.mlp_bias, default=False),
            residual_multiplier=multiplier,
            shared_blocks=SharedBlockKeys.read(config) if family.shares_blocks else None,
            mlp_limit=read_limit(config, family.mlp_limit),
            mlp_scales=None if family.mlp_scales is None else config.positives(family.mlp_scales, 2),
            quantization=quantization,
        )


def _language_model(raw: Mapping[str, Any], family: Family) -> ConfigReader:
    """The config of the language model. Raises ModelError where it is not there, or of another model type."""
    if not family.text or (family.may_be_flat and raw.get(family.text) is None):
        return ConfigReader(raw, "")
    config = ConfigReader(raw.get(family.text), f"{family.text}.")
    config.require("model_type", family.text_type, default=family.text_type)
    return config


def _mixer_shapes(
    config: ConfigReader, family: Family, layers: Sequence[LayerConfig]
) -> tuple[dict[MixerKind, MixerShape], dict[MixerKind | MlpKind, str]]:
    """The shapes of the layers' mixers, and why those of a kind can't be served. Raises ModelError naming the key."""
    shapes: dict[MixerKind, MixerShape] = {}
    unserved: dict[MixerKind | MlpKind, str] = {}
    for kind in dict.fromkeys(part for layer in layers for part in LayerKind(layer.mixer).mixers):
        if kind not in family.mixers:
            continue
        try:
            shapes[kind] = family.mixers[kind].read(config)
        except ModelError as error:
            if kind not in (MixerKind.ATTENTION, MixerKind.LATENT_ATTENTION):
                raise
            unserved[kind] = str(error)  # the other layers can be served all the same
    return shapes, unserved


def _intermediate_size(config: ConfigReader, family: Family) -> int:
    """The size of dense MLPs, 0 where there are none."""
    if family.inner is None:
        return 0
    if family.shares_blocks and config.get(family.inner) is None:
        return 4 * config.integer(family.hidden, 1, MAX_SIZE // 4)
    if family.adjusts_inner is not None:
        return family.adjusts_inner(config)
    return config.integer(family.inner, 1, MAX_SIZE, default=family.default_inner)


def _dtype(config: ConfigReader, raw: Mapping[str, Any]) -> str | None:
    """The dtype that the config names, under its new or its old key, nested or not."""
    named = config.get("dtype") or config.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype")
    if named is not None and named not in DTYPES:
        raise ModelError(f"dtype: expected one of {', '.join(DTYPES)}, got {shown(named)}")
    return named
