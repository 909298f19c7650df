"""Zamba2: Mamba2, and attention in blocks that layers share."""

from __future__ import annotations

from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.mamba2 import Mamba2Keys
from deltaline_server.models.layer_patterns import hybrid_layers
from deltaline_server.models.parts import MixerKind

ZAMBA2 = Family(
    layers=hybrid_layers,
    mixers={
        MixerKind.MAMBA2: Mamba2Keys(
            num_heads="n_mamba_heads",
            head_dim="mamba_headdim",
            derives_heads=True,
            state="mamba_d_state",
            groups=("mamba_ngroups",),
            conv_width=("mamba_d_conv",),
            conv_bias=None,
            bias="add_bias_linear",
            name="mamba.",
            default_groups=1,
            default_state=64,
            expand="mamba_expand",
            least_dt=("time_step_min",),
            norms_groups=True,
            eps=1e-5,
        ),
        MixerKind.ATTENTION: AttentionKeys(
            heads=32,
            positions=4096,
            bias=None,
            rotates=lambda config: config.flag("use_mem_rope", default=False),
            takes_embeddings=True,
        ),
    },
    blocks=BlockNames(("input_layernorm.",), norm_offset=0, mlp=MlpNames(activation=Activation.GELU)),
    activation=None,
    mlp_activation="hidden_act",
    default_eps=1e-5,
    mlp_bias="add_bias_linear",
    shares_blocks=True,
)
