"""Jamba: Mamba-1, attention without positions, MLPs and experts."""

from __future__ import annotations

from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.mamba1 import Mamba1Keys
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.layer_patterns import periodic_layers
from deltaline_server.models.parts import MixerKind

JAMBA = Family(
    layers=periodic_layers,
    mixers={
        MixerKind.MAMBA1: Mamba1Keys(
            state="mamba_d_state",
            conv_width="mamba_d_conv",
            expand="mamba_expand",
            step_rank="mamba_dt_rank",
            conv_bias="mamba_conv_bias",
            bias="mamba_proj_bias",
            name="mamba.",
            norm_eps="rms_norm_eps",
            has_norm_weights=True,
        ),
        MixerKind.ATTENTION: AttentionKeys(heads=32, kv_heads=8, positions=262_144, rotary=None, bias=None),
    },
    blocks=BlockNames(
        ("input_layernorm.", "pre_ff_layernorm."),
        norm_offset=0,
        mlp=MlpNames("feed_forward."),
        experts=ExpertNames("feed_forward.", router="router.weight", shared=None),
    ),
    experts=ExpertKeys(
        16,
        2,
        normalises=False,
        inner=14_336,
        count_keys=("num_local_experts", "num_experts"),
        inner_key="intermediate_size",
        shared_key=None,
    ),
    default_eps=1e-6,
)
