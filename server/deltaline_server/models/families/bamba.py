"""Bamba, Falcon-H1 and Granite 4: Mamba2 as Bamba's configs tell it, and attention."""

from __future__ import annotations

from dataclasses import replace

from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.mamba2 import Mamba2Keys
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.keys.rotary import RotaryKeys
from deltaline_server.models.layer_patterns import dense_or_expert_layers, indexed_layers, parallel_layers
from deltaline_server.models.parts import MixerKind

_BAMBA_MIXER = Mamba2Keys(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
    derives_heads=True,
    state="mamba_d_state",
    groups=("mamba_n_groups",),
    conv_width=("mamba_d_conv",),
    conv_bias=("mamba_conv_bias",),
    bias="mamba_proj_bias",
    name="mamba.",
    default_groups=1,
    default_state=256,
    expand="mamba_expand",
)
_GRANITE_MLP = MlpNames("shared_mlp.", ("input_linear",), "output_linear")
BAMBA: dict[str, Family] = {
    "bamba": Family(
        layers=indexed_layers,
        mixers={
            MixerKind.MAMBA2: _BAMBA_MIXER,
            MixerKind.ATTENTION: AttentionKeys(kv_heads=8, positions=262144, rotary=RotaryKeys(share=0.5, within=True)),
        },
        blocks=BlockNames(("input_layernorm.", "pre_ff_layernorm."), norm_offset=0, mlp=MlpNames("feed_forward.")),
        default_eps=1e-5,
        mlp_bias="mlp_bias",
    ),
    "falcon_h1": Family(
        layers=parallel_layers,
        mixers={
            MixerKind.MAMBA2: replace(
                _BAMBA_MIXER,
                channels="mamba_d_ssm",
                norms_groups=True,
                norm="mamba_rms_norm",
                norms_first="mamba_norm_before_gate",
                out_bias="projectors_bias",
                input_scale="ssm_in_multiplier",
                output_scale="ssm_out_multiplier",
                section_scales="ssm_multipliers",
            ),
            MixerKind.ATTENTION: AttentionKeys(
                heads=32,
                kv_heads=8,
                positions=8192,
                key_scale="key_multiplier",
                input_scale="attention_in_multiplier",
                output_scale="attention_out_multiplier",
            ),
        },
        blocks=BlockNames(("input_layernorm.", "pre_ff_layernorm."), norm_offset=0, mlp=MlpNames("feed_forward.")),
        default_eps=1e-5,
        mlp_bias="mlp_bias",
        mlp_scales="mlp_multipliers",
    ),
    "granitemoehybrid": Family(
        layers=dense_or_expert_layers,
        mixers={
            MixerKind.MAMBA2: _BAMBA_MIXER,
            MixerKind.ATTENTION: AttentionKeys(
                positions=2048,
                rotates=lambda config: config.choice("position_embedding_type", None, "nope", "rope") == "rope",
                scale="attention_multiplier",
            ),
        },
        blocks=BlockNames(
            ("input_layernorm.", "post_attention_layernorm."),
            norm_offset=0,
            mlp=_GRANITE_MLP,
            experts=ExpertNames(
                "block_sparse_moe.",
                router="router.layer.weight",
                gate_up="input_linear.weight",
                down="output_linear.weight",
                shared=_GRANITE_MLP,
                shared_gate=None,
            ),
        ),
        experts=ExpertKeys(
            num_experts=8,
            top_k=2,
            normalises=True,
            inner=None,
            shared=1024,
            count_keys=("num_local_experts",),
            inner_key="intermediate_size",
            shared_key="shared_intermediate_size",
            has_shared_gate=False,
        ),
        default_eps=1e-6,
        inner="shared_intermediate_size",
        residual_multiplier="residual_multiplier",
        # As transformers has them in memory.
        spellings={
            "block_sparse_moe.input_linear.weight": ("block_sparse_moe.experts.gate_up_proj",),
            "block_sparse_moe.output_linear.weight": ("block_sparse_moe.experts.down_proj",),
            "block_sparse_moe.router.layer.weight": ("block_sparse_moe.router.weight",),
        },
    ),
}
