"""Nemotron-H: one part in each layer."""

from __future__ import annotations

from dataclasses import replace

from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.expert_shape import SIGMOID
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.mamba2 import Mamba2Keys
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.layer_patterns import one_part_layers
from deltaline_server.models.parts import MixerKind

_NEMOTRON_MLP = MlpNames("mixer.", ("up_proj",), activation=Activation.RELU2)
NEMOTRON_H = Family(
    layers=one_part_layers,
    mixers={
        # An old spelling overrides the new one in the checkpoint's model, which takes time_step_min for the least
        # time step, and has no greatest one.
        MixerKind.MAMBA2: Mamba2Keys(
            num_heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            state="ssm_state_size",
            groups=("mamba_n_groups", "n_groups"),
            conv_width=("mamba_d_conv", "conv_kernel"),
            conv_bias=("mamba_conv_bias", "use_conv_bias"),
            bias="use_bias",
            least_dt=("mamba_dt_min", "time_step_min"),
            norms_groups=True,
        ),
        MixerKind.ATTENTION: AttentionKeys(
            heads=32, kv_heads=8, head_dim=128, positions=4096, name="mixer.", rotary=None, bias=None
        ),
    },
    blocks=BlockNames(
        ("norm.",),
        norm_offset=0,
        mlp=_NEMOTRON_MLP,
        experts=ExpertNames(
            "mixer.",
            gate_up="experts.up_proj",
            parts=(("up_proj",), ("down_proj",)),
            score_bias="gate.e_score_correction_bias",
            shared=replace(_NEMOTRON_MLP, name="mixer.shared_experts."),
            shared_gate=None,
        ),
    ),
    experts=ExpertKeys(
        num_experts=8,
        top_k=2,
        inner=7688,
        shared=7688,
        count_keys=("num_local_experts", "n_routed_experts"),
        shared_key="moe_shared_expert_intermediate_size",
        has_shared_gate=False,
        activation=Activation.RELU2,
        activation_key="mlp_hidden_act",
        scoring=SIGMOID,
        latent="moe_latent_size",
        bias="mlp_bias",
    ),
    activation="mamba_hidden_act",
    mlp_activation="mlp_hidden_act",
    mlp_bias="mlp_bias",
    eps="layer_norm_epsilon",
    default_eps=1e-5,
    default_inner=21504,
)
