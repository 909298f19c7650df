"""Kimi Linear: KDA and latent attention."""

from __future__ import annotations

from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.expert_shape import SIGMOID
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.kda import KdaKeys
from deltaline_server.models.keys.latent_attention import LatentKeys
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.layer_patterns import kda_or_latent_layers
from deltaline_server.models.parts import MixerKind

_EXPERTS = "block_sparse_moe."
# Of keys with two names the older one goes before the other in the checkpoint's model.
KIMI_LINEAR = Family(
    layers=kda_or_latent_layers,
    mixers={
        MixerKind.KDA: KdaKeys(num_heads=32, has_wide_rates=True),
        # Its norms of latents are made without the config's epsilon.
        MixerKind.LATENT_ATTENTION: LatentKeys(
            positions=1 << 20, positions_keys=("model_max_length", "max_position_embeddings"), eps=1e-6
        ),
    },
    blocks=BlockNames(
        ("input_layernorm.", "post_attention_layernorm."),
        norm_offset=0,
        experts=ExpertNames(
            _EXPERTS,
            parts=(("w1", "w3"), ("w2",)),
            score_bias="gate.e_score_correction_bias",
            shared=MlpNames(f"{_EXPERTS}shared_experts."),
            shared_gate=None,
        ),
    ),
    experts=ExpertKeys(
        num_experts=256,
        top_k=8,
        inner=1024,
        shared_keys=("num_shared_experts", "n_shared_experts"),
        has_shared_gate=False,
        scoring=SIGMOID,
        count_keys=("num_experts", "num_local_experts"),
        top_keys=("num_experts_per_token", "num_experts_per_tok"),
        group_keys=("num_expert_group", "n_group"),
        normalises_keys=("moe_renormalize", "norm_topk_prob"),
        scale=2.446,
    ),
    default_eps=1e-5,
    adapters_spell={f"self_attn.forget_gate.f_{part}_proj": f"self_attn.f_{part}_proj" for part in "ab"},
    # As transformers writes the dense layers.
    spellings={f"mlp.{part}_proj.weight": (f"{_EXPERTS}{part}_proj.weight",) for part in ("gate", "up", "down")},
)
