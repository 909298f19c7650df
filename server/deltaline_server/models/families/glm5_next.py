"""GLM-5 Next: KDA and latent attention around residual streams."""

from __future__ import annotations

from dataclasses import replace

from deltaline_server.checkpoints.modules import MlpNames
from deltaline_server.layers.block import BlockNames
from deltaline_server.layers.expert_shape import SIGMOID
from deltaline_server.layers.experts import ExpertNames
from deltaline_server.models.families.family import Family
from deltaline_server.models.keys.kda import KdaKeys
from deltaline_server.models.keys.latent_attention import LatentKeys
from deltaline_server.models.keys.mlp import ExpertKeys
from deltaline_server.models.layer_patterns import kda_or_sparse_layers
from deltaline_server.models.parts import MixerKind

_LIMIT = "swiglu_limit"
_TEXT = Family(
    layers=kda_or_sparse_layers,
    mixers={
        MixerKind.KDA: KdaKeys(num_heads=64, bounds_decays=True),
        MixerKind.LATENT_ATTENTION: LatentKeys(positions=1 << 20, is_sparse=True),
    },
    blocks=BlockNames(
        ("input_layernorm.", "post_attention_layernorm."),
        norm_offset=0,
        experts=ExpertNames(
            score_bias="gate.e_score_correction_bias", shared=MlpNames("mlp.shared_experts."), shared_gate=None
        ),
    ),
    experts=ExpertKeys(
        num_experts=288,
        top_k=8,
        inner=2048,
        shared_keys=("n_shared_experts",),
        has_shared_gate=False,
        scoring=SIGMOID,
        count_keys=("num_local_experts", "n_routed_experts"),
        scale=2.5,
        limit=_LIMIT,
    ),
    default_eps=1e-5,
    mlp_limit=_LIMIT,
    streams=4,
    averages_streams=True,
    unread=("self_attn.indexer.",),
    adapters_spell={f"self_attn.forget_gate.f_{part}_proj": f"self_attn.f_{part}_proj" for part in "ab"},
    # As published checkpoints have them.
    spellings={
        f"{branch}_hc.{part}": (f"hc_{branch}_{part}",)
        for branch in ("attn", "ffn")
        for part in ("fn", "scale", "base")
    },
)
GLM5_NEXT: dict[str, Family] = {
    "glm5_next": replace(
        _TEXT,
        text="text_config",
        text_type="glm5_next_text",
        may_be_flat=True,
        beside=("model.visual.", "visual."),
    ),
    "glm5_next_text": _TEXT,
}
