"""Mamba-1 and Mamba2 alone, the latter in the formats of transformers and of mamba-ssm."""

from __future__ import annotations

from dataclasses import replace

from deltaline_server.layers.block import BlockNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.mamba1 import Mamba1Keys
from deltaline_server.models.keys.mamba2 import Mamba2Keys, MambaSsmKeys
from deltaline_server.models.layer_patterns import mamba1_layers, mamba2_layers, mamba_ssm_layers
from deltaline_server.models.parts import MixerKind

_MAMBA_BLOCKS = BlockNames(("norm.",), norm_offset=0)
# What configs without a model_type are called here: those that mamba-ssm writes.
MAMBA_SSM = "mamba_ssm"
_MAMBA1_KEYS = Mamba1Keys(
    state="state_size",
    conv_width="conv_kernel",
    expand="expand",
    step_rank="time_step_rank",
    conv_bias="use_conv_bias",
    bias="use_bias",
    channels="intermediate_size",
)
_MAMBA1 = Family(
    layers=mamba1_layers,
    mixers={MixerKind.MAMBA1: _MAMBA1_KEYS},
    blocks=_MAMBA_BLOCKS,
    eps="layer_norm_epsilon",
    default_eps=1e-5,
    inner=None,
    sums_in_fp32=True,
)
MAMBA: dict[str, Family] = {
    "mamba": _MAMBA1,
    "falcon_mamba": replace(_MAMBA1, mixers={MixerKind.MAMBA1: replace(_MAMBA1_KEYS, norm_eps="mixer_rms_eps")}),
    "mamba2": Family(
        layers=mamba2_layers,
        mixers={
            MixerKind.MAMBA2: Mamba2Keys(
                num_heads="num_heads",
                head_dim="head_dim",
                state="state_size",
                groups=("n_groups",),
                conv_width=("conv_kernel",),
                conv_bias=("use_conv_bias",),
                bias="use_bias",
                expand="expand",
            )
        },
        blocks=_MAMBA_BLOCKS,
        eps="layer_norm_epsilon",
        default_eps=1e-5,
        inner=None,
        sums_in_fp32=True,
    ),
    MAMBA_SSM: Family(
        layers=mamba_ssm_layers,
        mixers={MixerKind.MAMBA2: MambaSsmKeys()},
        blocks=_MAMBA_BLOCKS,
        hidden="d_model",
        eps="norm_epsilon",
        default_eps=1e-5,
        inner=None,
        sums_in_fp32=True,
    ),
}
