"""LFM2, alone and beside what sees: short convolutions and attention."""

from __future__ import annotations

from dataclasses import replace

from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.expert_shape import SIGMOID
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.layers.shapes import QkNorm
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.mlp import ExpertKeys, adjusted_size
from deltaline_server.models.keys.rotary import RotaryKeys
from deltaline_server.models.keys.short_conv import ShortConvKeys
from deltaline_server.models.layer_patterns import short_conv_layers, short_conv_or_expert_layers
from deltaline_server.models.parts import MixerKind

_LFM2_NAMES = BlockNames(
    ("operator_norm.", "ffn_norm."),
    norm_offset=0,
    mlp=MlpNames("feed_forward.", ("w1", "w3"), "w2"),
    experts=ExpertNames("feed_forward.", parts=(("w1", "w3"), ("w2",)), score_bias="expert_bias", shared=None),
)
_LFM2_EXPERTS = ExpertKeys(
    32, 4, inner=1792, shared_key=None, scoring=SIGMOID, has_groups=False, score_bias="use_expert_bias"
)
_LFM2 = Family(
    layers=short_conv_layers,
    mixers={
        MixerKind.SHORT_CONV: ShortConvKeys(),
        MixerKind.ATTENTION: AttentionKeys(
            heads=32,
            kv_heads=8,
            positions=128_000,
            qk_norm=QkNorm.HEAD,
            rotary=RotaryKeys(theta=1e6),
            bias=None,
            out="out_proj",
            norms=("q_layernorm.weight", "k_layernorm.weight"),
        ),
    },
    blocks=_LFM2_NAMES,
    activation=None,
    eps="norm_eps",
    default_eps=1e-5,
    adjusts_inner=adjusted_size,
)
LFM2: dict[str, Family] = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, layers=short_conv_or_expert_layers, adjusts_inner=None, experts=_LFM2_EXPERTS),
    "lfm2_vl": replace(
        _LFM2,
        text="text_config",
        text_type="lfm2",
        beside=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
    ),
}
