"""Olmo-Hybrid: Gated DeltaNet and attention, each in blocks of its own."""

from __future__ import annotations

from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.mixers.gated_delta_net import DeltaLayout
from deltaline_server.layers.shapes import QkNorm
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.gated_delta_net import GatedDeltaNetKeys
from deltaline_server.models.keys.rotary import has_rope_theta
from deltaline_server.models.layer_patterns import every_fourth_layers
from deltaline_server.models.parts import MixerKind

OLMO_HYBRID = Family(
    layers=every_fourth_layers,
    mixers={
        MixerKind.GATED_DELTA_NET: GatedDeltaNetKeys(
            DeltaLayout.APART, eps=1e-5, doubles_updates="linear_allow_neg_eigval", derives_sizes=True
        ),
        MixerKind.ATTENTION: AttentionKeys(positions=65536, qk_norm=QkNorm.WHOLE, rotates=has_rope_theta),
    },
    blocks=BlockNames(("input_layernorm.", "post_attention_layernorm."), norm_offset=0),
    attention_blocks=BlockNames(
        ("post_attention_layernorm.", "post_feedforward_layernorm."), norm_offset=0, norms_outputs=True
    ),
    default_eps=1e-6,
    spellings={
        "input_layernorm.weight": ("attention_layer_norm.weight",),
        "post_attention_layernorm.weight": ("feedforward_layer_norm.weight",),
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv"),
    },
)
