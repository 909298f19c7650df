"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention."""

from __future__ import annotations

from dataclasses import replace

from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.mixers.gated_delta_net import DeltaLayout
from deltaline_server.layers.shapes import QkNorm
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.gated_delta_net import GatedDeltaNetKeys
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.keys.rotary import RotaryKeys
from deltaline_server.models.layer_patterns import dense_layers, expert_layers, sparse_layers
from deltaline_server.models.parts import MixerKind

_QWEN_BLOCKS = BlockNames(("input_layernorm.", "post_attention_layernorm."), norm_offset=1)
_QWEN_ATTENTION = AttentionKeys(
    heads=16,
    kv_heads=4,
    head_dim=256,
    is_gated=True,
    qk_norm=QkNorm.HEAD,
    rotary=RotaryKeys(share=0.25, beside=True, within=True),
)
_QWEN3_5 = Family(
    layers=dense_layers,
    mixers={
        MixerKind.GATED_DELTA_NET: GatedDeltaNetKeys(),
        MixerKind.ATTENTION: _QWEN_ATTENTION,
    },
    blocks=_QWEN_BLOCKS,
    default_eps=1e-6,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    layers=expert_layers,
    mixers={**_QWEN3_5.mixers, MixerKind.ATTENTION: replace(_QWEN_ATTENTION, kv_heads=2)},
    experts=ExpertKeys(num_experts=256, top_k=8, normalises=True),
    inner=None,
)
_VISION = ("model.visual.", "visual.")
QWEN: dict[str, Family] = {
    "qwen3_next": Family(
        layers=sparse_layers,
        mixers={
            MixerKind.GATED_DELTA_NET: GatedDeltaNetKeys(layout=DeltaLayout.INTERLEAVED),
            MixerKind.ATTENTION: replace(_QWEN_ATTENTION, kv_heads=2),
        },
        blocks=_QWEN_BLOCKS,
        default_eps=1e-6,
        experts=ExpertKeys(num_experts=512, top_k=10),
    ),
    "qwen3_5": replace(_QWEN3_5, text="text_config", text_type="qwen3_5_text", beside=_VISION),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5_MOE, text="text_config", text_type="qwen3_5_moe_text", beside=_VISION),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
