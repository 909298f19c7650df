"""The table of families: of each model type what its configs say, how its tensors are called, which parts it has.

A family of known parts is an entry here and a test of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.config_reader import ConfigReader
from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.layers.gated_delta_net import DeltaLayout
from deltaline_server.layers.shapes import SIGMOID, QkNorm
from deltaline_server.models.layer_patterns import (
    dense_layers,
    dense_or_expert_layers,
    every_fourth_layers,
    expert_layers,
    hybrid_layers,
    indexed_layers,
    mamba2_layers,
    mamba_ssm_layers,
    one_part_layers,
    parallel_layers,
    short_conv_layers,
    short_conv_or_expert_layers,
    sparse_layers,
)
from deltaline_server.models.mixer_keys import (
    AttentionKeys,
    GatedDeltaNetKeys,
    Mamba2Keys,
    MambaSsmKeys,
    MixerKeys,
    RotaryKeys,
    ShortConvKeys,
    has_rope_theta,
)
from deltaline_server.models.mlp_keys import ExpertKeys, adjusted_size
from deltaline_server.models.parts import LayerConfig, LayerKind, MixerKind


@dataclass(frozen=True)
class Family:
    """What the checkpoints of a model type have in common.

    layers: reads which parts each layer has. mixers: by kind, how their configs are read; a kind that is not here is
    not served yet. blocks: how what surrounds a mixer is stored, and what its norms multiply by; attention_blocks: of
    attention, None for the same. experts: how the configs of layers with a mixture of them are read, None where they
    are not served yet. text: the key that has the language model's config, "" where it is the config itself. beside:
    the beginnings of the names of modules that belong to no layer. spellings: tensors of a layer that may be stored
    under other names, or in parts, row behind row. activation: the key that must say silu; mlp_activation: the one that
    must say what the blocks' MLP computes, None where it is the same. eps, default_eps: the key of the norms' epsilon,
    and what it is where a config does not say, None where it must. hidden: the key of the hidden size. inner: the key
    of the size of dense MLPs, None where there are none. mlp_bias: the key of whether they have biases, None where they
    have none. residual_multiplier: the key of what multiplies what branches add, None where nothing does. mlp_scales:
    the key of what gates and outputs of dense MLPs are multiplied by, None where nothing. sums_in_fp32: whether
    residual_in_fp32 is asked. adjusts_inner: what makes the size of dense MLPs of the config, None where that says it.
    """

    layers: Callable[[ConfigReader], tuple[LayerConfig, ...]]
    mixers: Mapping[MixerKind, MixerKeys]
    blocks: BlockNames
    experts: ExpertKeys | None = None
    text: str = ""
    beside: tuple[str, ...] = ()
    activation: str | None = "hidden_act"
    mlp_activation: str | None = None
    eps: str = "rms_norm_eps"
    default_eps: float | None = None
    hidden: str = "hidden_size"
    inner: str | None = "intermediate_size"
    residual_multiplier: str | None = None
    mlp_scales: str | None = None
    mlp_bias: str | None = None
    sums_in_fp32: bool = False
    adjusts_inner: Callable[[ConfigReader], int] | None = None
    shares_blocks: bool = False
    attention_blocks: BlockNames | None = None
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def blocks_of(self, kind: LayerKind) -> BlockNames:
        """How what surrounds mixers of a kind of layers is stored."""
        return self.attention_blocks or self.blocks if kind.mixer is MixerKind.ATTENTION else self.blocks

    @property
    def takes_streams(self) -> bool:
        """Whether residual streams may stand in place of the residual: branches are norm, mixer or MLP, sum."""
        return (
            self.residual_multiplier is None
            and not self.shares_blocks
            and not (self.attention_blocks or self.blocks).norms_outputs
        )


_QWEN_BLOCKS = BlockNames(("input_layernorm.", "post_attention_layernorm."), norm_offset=1)
_MAMBA_BLOCKS = BlockNames(("norm.",), norm_offset=0)
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
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    layers=expert_layers,
    mixers={**_QWEN3_5.mixers, MixerKind.ATTENTION: replace(_QWEN_ATTENTION, kv_heads=2)},
    experts=ExpertKeys(num_experts=256, top_k=8, normalises=True),
    inner=None,
)
_BAMBA_MIXER = Mamba2Keys(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
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
_NEMOTRON_MLP = MlpNames("mixer.", ("up_proj",), activation=Activation.RELU2)
_GRANITE_MLP = MlpNames("shared_mlp.", ("input_linear",), "output_linear")
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
_VISION = ("model.visual.", "visual.")
# What configs without a model_type are called here: those that mamba-ssm writes.
MAMBA_SSM = "mamba_ssm"
FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        layers=sparse_layers,
        mixers={
            MixerKind.GATED_DELTA_NET: GatedDeltaNetKeys(layout=DeltaLayout.INTERLEAVED),
            MixerKind.ATTENTION: replace(_QWEN_ATTENTION, kv_heads=2),
        },
        blocks=_QWEN_BLOCKS,
        experts=ExpertKeys(num_experts=512, top_k=10),
    ),
    "qwen3_5": replace(_QWEN3_5, text="text_config", beside=_VISION),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5_MOE, text="text_config", beside=_VISION),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
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
    "nemotron_h": Family(
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
            count_key="n_routed_experts",
            shared_key="moe_shared_expert_intermediate_size",
            has_shared_gate=False,
            activation=Activation.RELU2,
            activation_key="mlp_hidden_act",
            scoring=SIGMOID,
            absent=("moe_latent_size", "mlp_bias"),
        ),
        activation="mamba_hidden_act",
        mlp_activation="mlp_hidden_act",
        mlp_bias="mlp_bias",
        eps="layer_norm_epsilon",
        default_eps=1e-5,
    ),
    "bamba": Family(
        layers=indexed_layers,
        mixers={
            MixerKind.MAMBA2: _BAMBA_MIXER,
            MixerKind.ATTENTION: AttentionKeys(positions=262144, rotary=RotaryKeys(share=0.5, within=True)),
        },
        blocks=BlockNames(("input_layernorm.", "pre_ff_layernorm."), norm_offset=0, mlp=MlpNames("feed_forward.")),
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
            count_key="num_local_experts",
            inner_key="intermediate_size",
            shared_key="shared_intermediate_size",
            has_shared_gate=False,
        ),
        inner="shared_intermediate_size",
        residual_multiplier="residual_multiplier",
    ),
    "zamba2": Family(
        layers=hybrid_layers,
        mixers={
            MixerKind.MAMBA2: Mamba2Keys(
                num_heads="n_mamba_heads",
                head_dim=None,
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
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, layers=short_conv_or_expert_layers, adjusts_inner=None, experts=_LFM2_EXPERTS),
    "olmo_hybrid": Family(
        layers=every_fourth_layers,
        mixers={
            MixerKind.GATED_DELTA_NET: GatedDeltaNetKeys(
                DeltaLayout.APART, eps=1e-5, doubles_updates="linear_allow_neg_eigval"
            ),
            MixerKind.ATTENTION: AttentionKeys(positions=65536, qk_norm=QkNorm.WHOLE, rotates=has_rope_theta),
        },
        blocks=BlockNames(("input_layernorm.", "post_attention_layernorm."), norm_offset=0),
        attention_blocks=BlockNames(
            ("post_attention_layernorm.", "post_feedforward_layernorm."), norm_offset=0, norms_outputs=True
        ),
        spellings={
            "input_layernorm.weight": ("attention_layer_norm.weight",),
            "post_attention_layernorm.weight": ("feedforward_layer_norm.weight",),
            "linear_attn.conv1d.weight": tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv"),
        },
    ),
}
