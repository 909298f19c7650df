"""Which parts the layers of a checkpoint have: the ways in which configs of families say so.

Each reads the layers of a config, in their order, and raises ModelError naming the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.models.parts import MAX_LAYERS, MAX_SIZE, LayerConfig, MixerKind, MlpKind

Kind = TypeVar("Kind", MixerKind, MlpKind)
_LAYER_TYPES = {"linear_attention": MixerKind.GATED_DELTA_NET, "full_attention": MixerKind.ATTENTION}
# Of a hybrid with Mamba2, in their new and their old spelling.
_MIXERS = {
    "linear_attention": MixerKind.MAMBA2,
    "full_attention": MixerKind.ATTENTION,
    "mamba": MixerKind.MAMBA2,
    "attention": MixerKind.ATTENTION,
}
# Of Kimi Linear.
_LATENTS = {"linear_attention": MixerKind.KDA, "full_attention": MixerKind.LATENT_ATTENTION}
# Of GLM-5 Next.
_SPARSE = _LATENTS | {"deepseek_sparse_attention": MixerKind.LATENT_ATTENTION}
_NUMBERED = ("full_attn_layers", "kda_layers")
_MLPS = {"dense": MlpKind.DENSE, "sparse": MlpKind.MIXTURE_OF_EXPERTS}
# Of LFM2.
_CONVOLUTIONS = {"conv": MixerKind.SHORT_CONV, "full_attention": MixerKind.ATTENTION}
# Of Zamba2, in their new and their old spelling.
_SHARED: dict[str, tuple[MixerKind, MlpKind | None]] = {
    "linear_attention": (MixerKind.MAMBA2, None),
    "hybrid": (MixerKind.MAMBA2_BEHIND_ATTENTION, MlpKind.DENSE),
    "mamba": (MixerKind.MAMBA2, None),
}
# A layer of Nemotron-H has one part: as its config lists them, in its old spelling, and as letters of a pattern.
_MAMBA, _ATTENTION = (MixerKind.MAMBA2, None), (MixerKind.ATTENTION, None)
_DENSE, _EXPERTS = (None, MlpKind.DENSE), (None, MlpKind.MIXTURE_OF_EXPERTS)
_BLOCK_TYPES: dict[str, tuple[MixerKind | None, MlpKind | None]] = {
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


def dense_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """`layer_types`, or every full_attention_interval-th is attention; a dense MLP in each."""
    return tuple(LayerConfig(i, mixer, MlpKind.DENSE) for i, mixer in enumerate(_mixers(config)))


def every_fourth_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """`layer_types`, or every fourth is attention, and the last where no other is; a dense MLP in each."""
    num_layers = _num_layers(config)
    interval = 4 if num_layers >= 4 else num_layers
    return tuple(LayerConfig(i, mixer, MlpKind.DENSE) for i, mixer in enumerate(_typed_mixers(config, interval)))


def expert_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """`layer_types`, or every full_attention_interval-th is attention; experts in each."""
    return tuple(LayerConfig(i, mixer, MlpKind.MIXTURE_OF_EXPERTS) for i, mixer in enumerate(_mixers(config)))


def sparse_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """`layer_types` or full_attention_interval; experts in every decoder_sparse_step-th, but for `mlp_only_layers`.

    Absent keys mean what they mean to the checkpoint's model.
    """
    dense = _layer_numbers(config, "mlp_only_layers")
    num_experts = config.integer("num_experts", 0, MAX_SIZE, default=512)
    step = config.integer("decoder_sparse_step", 1, MAX_SIZE, default=1)
    mlps = (
        MlpKind.DENSE if i in dense or num_experts == 0 or (i + 1) % step else MlpKind.MIXTURE_OF_EXPERTS
        for i in range(_num_layers(config))
    )
    return tuple(LayerConfig(i, *parts) for i, parts in enumerate(zip(_mixers(config), mlps, strict=True)))


def mamba1_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """A Mamba-1 mixer alone in each."""
    return tuple(LayerConfig(i, MixerKind.MAMBA1, None) for i in range(_num_layers(config)))


def periodic_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Attention in every attn_layer_period-th layer from attn_layer_offset on, Mamba-1 in the others; experts in every
    expert_layer_period-th from expert_layer_offset on, if there are several, and a dense MLP in the others."""
    attention, experts = _period(config, "attn_layer", 8, 4), _period(config, "expert_layer", 2, 1)
    key = config.spelling("num_local_experts", "num_experts")
    has_experts = config.integer(key, 1, MAX_SIZE, default=16) > 1
    return tuple(
        LayerConfig(
            i,
            MixerKind.ATTENTION if i in attention else MixerKind.MAMBA1,
            MlpKind.MIXTURE_OF_EXPERTS if has_experts and i in experts else MlpKind.DENSE,
        )
        for i in range(_num_layers(config))
    )


def mamba2_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """A Mamba2 mixer alone in each."""
    return tuple(LayerConfig(i, MixerKind.MAMBA2, None) for i in range(_num_layers(config)))


def parallel_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Mamba2 and attention beside each other, and a dense MLP, in each."""
    return tuple(LayerConfig(i, MixerKind.MAMBA2_AND_ATTENTION, MlpKind.DENSE) for i in range(_num_layers(config)))


def hybrid_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Mamba2 in each; in those that `layers_block_type` calls hybrid behind a shared block, which has an MLP too."""
    num_layers, types = _num_layers(config), config.get("layers_block_type")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(_SHARED) for kind in types):
        raise config.fail("layers_block_type", f"{num_layers} of {', '.join(_SHARED)}")
    hybrid = [i for i, kind in enumerate(types) if kind == "hybrid"]
    if config.get("hybrid_layer_ids") not in (None, hybrid):
        raise config.fail("hybrid_layer_ids", f"{hybrid}, as layers_block_type says")
    return tuple(LayerConfig(i, *_SHARED[kind]) for i, kind in enumerate(types))


def mamba_ssm_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Attention in the layers of `attn_layer_idx`, Mamba2 in the others, nothing beside them."""
    attention = _layer_numbers(config, "attn_layer_idx")
    if config.get("d_intermediate") not in (None, 0):
        raise config.fail("d_intermediate", "0 (MLPs are not served in this format)")
    if not config.flag("rms_norm", default=True):
        raise config.fail("rms_norm", "true")
    kinds = (MixerKind.ATTENTION if i in attention else MixerKind.MAMBA2 for i in range(_num_layers(config, "n_layer")))
    return tuple(LayerConfig(i, kind, None) for i, kind in enumerate(kinds))


def indexed_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Attention in the layers of `attn_layer_indices`, Mamba2 in the others; a dense MLP in each."""
    num_layers, attention = _num_layers(config), _layer_numbers(config, "attn_layer_indices")
    kinds = (MixerKind.ATTENTION if i in attention else MixerKind.MAMBA2 for i in range(num_layers))
    return tuple(LayerConfig(i, kind, MlpKind.DENSE) for i, kind in enumerate(kinds))


def dense_or_expert_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Mamba2 or attention as `layer_types` says, all Mamba2 without; experts in each, or a dense MLP where none are."""
    num_layers, key = _num_layers(config), config.spelling("layers_block_type", "layer_types")
    types = config.get(key)
    if types is None:
        types = ["linear_attention"] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(_MIXERS) for kind in types):
        raise config.fail(key, f"{num_layers} of {', '.join(_MIXERS)}")
    has_experts = config.integer("num_local_experts", 0, MAX_SIZE, default=8) > 0
    mlp = MlpKind.MIXTURE_OF_EXPERTS if has_experts else MlpKind.DENSE
    return tuple(LayerConfig(i, _MIXERS[kind], mlp) for i, kind in enumerate(types))


def short_conv_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Short convolutions or attention as `layer_types` says; without, attention in the layers of `full_attn_idxs`, and
    in all without either. A dense MLP in each."""
    num_layers = _num_layers(config)
    if config.get("layer_types") is not None:
        mixers = _named(config, "layer_types", _CONVOLUTIONS, num_layers)
    else:
        attention = _layer_numbers(config, "full_attn_idxs")
        has_all = config.get("full_attn_idxs") is None
        mixers = [MixerKind.ATTENTION if has_all or i in attention else MixerKind.SHORT_CONV for i in range(num_layers)]
    return tuple(LayerConfig(i, mixer, MlpKind.DENSE) for i, mixer in enumerate(mixers))


def short_conv_or_expert_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """Short convolutions or attention as `layer_types` says; a dense MLP in the first `num_dense_layers`, experts in
    the others."""
    num_layers = _num_layers(config)
    num_dense = config.integer("num_dense_layers", 0, MAX_LAYERS, default=2)
    return tuple(
        LayerConfig(i, mixer, MlpKind.DENSE if i < num_dense else MlpKind.MIXTURE_OF_EXPERTS)
        for i, mixer in enumerate(_named(config, "layer_types", _CONVOLUTIONS, num_layers))
    )


def kda_or_latent_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """KDA or latent attention as the lists of `linear_attn_config` say, which count layers from 1, else `layer_types`;
    without either, attention in every fourth layer but the first. Experts as `mlp_layer_types` says; without, in all
    but the first `first_k_dense_replace`."""
    if not config.flag("mla_use_nope", default=True):
        raise config.fail("mla_use_nope", "true, as keys are not rotated")
    config.choice("moe_router_activation_func", "sigmoid")
    config.integer("moe_layer_freq", 1, 1, default=1)
    num_layers = _num_layers(config)
    numbered = config.nested("linear_attn_config") if config.get("linear_attn_config") is not None else None
    if config.get("layer_types") is not None:
        mixers = _named(config, "layer_types", _LATENTS, num_layers)
    elif numbered is not None and all(map(numbered.says, _NUMBERED)):
        attention, linear = (_layer_numbers(numbered, key) for key in _NUMBERED)
        if sorted(attention + linear) != list(range(1, num_layers + 1)):
            raise numbered.fail("kda_layers", f"what full_attn_layers leaves of the layers 1..{num_layers}")
        mixers = [MixerKind.LATENT_ATTENTION if i + 1 in attention else MixerKind.KDA for i in range(num_layers)]
    else:
        mixers = [MixerKind.KDA if i % 4 or i == 0 else MixerKind.LATENT_ATTENTION for i in range(num_layers)]
    if config.get("mlp_layer_types") is not None:
        mlps = _named(config, "mlp_layer_types", _MLPS, num_layers)
    else:
        num_dense = config.integer("first_k_dense_replace", 0, MAX_LAYERS, default=1)
        mlps = [MlpKind.DENSE if i < num_dense else MlpKind.MIXTURE_OF_EXPERTS for i in range(num_layers)]
    return tuple(LayerConfig(i, *parts) for i, parts in enumerate(zip(mixers, mlps, strict=True)))


def kda_or_sparse_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """KDA or latent attention as `layer_types` says; without, attention in every fourth layer. Experts as
    `mlp_layer_types` says; without, in all but the first three."""
    num_layers = _num_layers(config)
    if config.get("layer_types") is not None:
        mixers = _named(config, "layer_types", _SPARSE, num_layers)
    else:
        mixers = [MixerKind.KDA if i % 4 != 3 else MixerKind.LATENT_ATTENTION for i in range(num_layers)]
    if config.get("mlp_layer_types") is not None:
        mlps = _named(config, "mlp_layer_types", _MLPS, num_layers)
    else:
        mlps = [MlpKind.DENSE if i < 3 else MlpKind.MIXTURE_OF_EXPERTS for i in range(num_layers)]
    return tuple(LayerConfig(i, *parts) for i, parts in enumerate(zip(mixers, mlps, strict=True)))


def one_part_layers(config: ConfigReader) -> tuple[LayerConfig, ...]:
    """One part in each: `layer_types`, else `layers_block_type`, else the letters of `hybrid_override_pattern`."""
    key = config.spelling("layer_types", "layers_block_type", "hybrid_override_pattern")
    types = config.get(key)
    is_known = isinstance(types, list | str) and all(isinstance(kind, str) and kind in _BLOCK_TYPES for kind in types)
    if not is_known or not 1 <= len(types) <= MAX_LAYERS:
        raise config.fail(key, f"1..{MAX_LAYERS} of {', '.join(_BLOCK_TYPES)}")
    return tuple(LayerConfig(i, *_BLOCK_TYPES[kind]) for i, kind in enumerate(types))


def _num_layers(config: ConfigReader, key: str = "num_hidden_layers") -> int:
    return config.integer(key, 1, MAX_LAYERS)


def _period(config: ConfigReader, name: str, period: int, offset: int) -> range:
    """The layers that a period and an offset say, with these where a config says nothing."""
    step = config.integer(f"{name}_period", 1, MAX_LAYERS, default=period)
    return range(config.integer(f"{name}_offset", 0, step - 1, default=offset), MAX_LAYERS, step)


def _named(config: ConfigReader, key: str, kinds: Mapping[str, Kind], num_layers: int) -> list[Kind]:
    """The parts that a list of names says, one for each layer."""
    types = config.get(key)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in list(kinds) for kind in types):
        raise config.fail(key, f"{num_layers} of {', '.join(kinds)}")
    return [kinds[kind] for kind in types]


def _layer_numbers(config: ConfigReader, key: str) -> list[int]:
    """A list of layers, empty where the config has none."""
    numbers = config.get(key)
    if numbers is None:
        return []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise config.fail(key, "a list of layer numbers")
    return numbers


def _mixers(config: ConfigReader) -> tuple[MixerKind, ...]:
    interval = 4
    if config.get("layer_types") is None:
        interval = config.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
    return _typed_mixers(config, interval)


def _typed_mixers(config: ConfigReader, interval: int) -> tuple[MixerKind, ...]:
    """Those of `layer_types`; without, attention every so many layers."""
    num_layers, types = _num_layers(config), config.get("layer_types")
    if types is None:
        return tuple(
            MixerKind.GATED_DELTA_NET if (i + 1) % interval else MixerKind.ATTENTION for i in range(num_layers)
        )
    return tuple(_named(config, "layer_types", _LAYER_TYPES, num_layers))
