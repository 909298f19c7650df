"""Small models of every family and what a rank, or the one process there is, computes of the same steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rigs.adapter_cases import adapter_config, plan_adapter, poisoned, tensors_of
from rigs.layer_oracle import MAX_DRAFT, Served, serve
from rigs.small_models import (
    BAMBA,
    EXPERTS,
    FALCON,
    GATED_DELTA_NET,
    GLM5_NEXT,
    GRANITE,
    HYBRID,
    JAMBA,
    KIMI,
    LFM2_MOE,
    MAMBA1,
    MAMBA2,
    NEMOTRON,
    ZAMBA,
)
from torch import Tensor

from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.state_pool import LayerState
from deltaline_server.models.model import AdapterOptions, Model, ModelOptions, open_weights
from deltaline_server.ranks.ways import Ranks

# Of 2 key-value heads, 4 ranks have the same one by twos; likewise of Mamba2's 2 groups, whose norm has one.
_LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
_ATTENTION = {"num_attention_heads": 8, "attention_bias": True}
_BIASES = {"attention_bias": True, "mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True}
_SCALES = {f"{part}_multiplier": 0.75 for part in ("attention_in", "attention_out", "ssm_in", "ssm_out")}
MODELS: dict[str, dict[str, Any]] = {
    "gated-delta-net": GATED_DELTA_NET | _LINEAR,
    "hybrid": HYBRID | _LINEAR | _ATTENTION,
    "experts": EXPERTS | _LINEAR | _ATTENTION,
    "interleaved": EXPERTS | _LINEAR | _ATTENTION | {"model_type": "qwen3_next"},
    "streams": HYBRID | _LINEAR | _ATTENTION | {"hc_mult": 2},
    "mamba1": MAMBA1 | {"use_bias": True},
    "mamba2": MAMBA2 | {"use_bias": True},
    "nemotron": NEMOTRON | {"use_bias": True},
    "nemotron-latents": NEMOTRON | {"moe_latent_size": 24, "mlp_bias": True, "moe_shared_expert_intermediate_size": 40},
    "falcon": FALCON | _BIASES | _SCALES,
    "falcon-norm": FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 1},
    "zamba": ZAMBA,
    "bamba": BAMBA | {"num_attention_heads": 8, "mlp_bias": True},
    "lfm2": LFM2_MOE | {"conv_bias": True},
    "jamba": JAMBA,
    "kimi": KIMI,
    "glm5_next": GLM5_NEXT,
    "kimi-low-rank": KIMI | {"q_lora_rank": 12, "qk_rope_head_dim": 0},
    "granite": GRANITE | {"num_attention_heads": 8},
}
# A prefill; drafts beside a decode; a decode that commits two drafts; another. Of two rows each: lengths, which are
# drafts, how many are accepted.
STEPS: tuple[tuple[tuple[int, int], tuple[bool, bool], tuple[int, int]], ...] = (
    ((70, 33), (False, False), (0, 0)),
    ((MAX_DRAFT, 1), (True, False), (0, 0)),
    ((1, 1), (False, False), (2, 0)),
    ((1, 1), (False, False), (0, 0)),
)
# What the state of a layer is called among what was computed, before its place.
STATE = "state of layer "


def write_configs(folder: Path, models: Mapping[str, Mapping[str, Any]] = MODELS) -> dict[str, Path]:
    """Write a config.json of each model."""
    paths = {name: folder / f"{name}.json" for name in models}
    for name, path in paths.items():
        path.write_text(json.dumps(models[name]))
    return paths


def play(served: Served, seeds: Sequence[int], lines: Sequence[int], slots: Sequence[int] | None = None) -> Tensor:
    """Compute STEPS on two lines, each with inputs of its own seed; the outputs of the first row, then of the other."""
    sources = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows: tuple[list[Tensor], list[Tensor]] = [], []
    for lengths, is_draft, accepted in STEPS:
        shape = served.model.ends[0].input_shape
        hidden = [torch.randn(n, *shape, generator=source) for n, source in zip(lengths, sources, strict=True)]
        made = served.step(torch.cat(hidden), lines, lengths, verify=is_draft, accepted=accepted, slots=slots)
        for row, part in zip(rows, made.split(lengths), strict=True):
            row.append(part)
    return torch.cat([*rows[0], *rows[1]])


def play_all(
    ranks: Ranks | None, configs: Mapping[str, Path], dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """Compute the steps of every model: once, once more, with another second row, and with an adapter on the first.

    And what is left of it: recurrent states and keys, their heads second. ranks: None for the whole model.
    """
    made = {}
    for name, path in configs.items():
        options = ModelOptions(torch.device("cpu"), random_init=path, dtype=dtype, adapters=AdapterOptions(1, 8))
        if ranks is not None:
            options = replace(options, rank=ranks.rank, world_size=ranks.world_size, ranks=ranks)
        served = serve(options, lines=8)
        adapt(served.model, options)
        made[name] = {
            "once": play(served, (1, 2), (1, 2)),
            "again": play(served, (1, 2), (3, 4)),
            "beside another": play(served, (1, 3), (5, 6)),
            "adapted": play(served, (1, 2), (7, 8), (0, -1)),
        }
        for number, state in enumerate(served.pool.layers):
            made[name][f"{STATE}{number}"] = _kept(state).contiguous()
    return made


def _kept(state: LayerState | KvState) -> Tensor:
    """What is left in a layer's state, its heads second: keys, a recurrent state, or channels of a convolution where
    there is none."""
    if isinstance(state, KvState):
        return state.k_pages.nan_to_num().transpose(1, 2)
    return state.recurrent if state.recurrent.numel() else state.conv.transpose(1, 2)


def sum_summands(ranks: Ranks, summands: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Sum tensors over the ranks. summands: of each rank, its summand of each of them."""
    return [ranks.sum(summand) for summand in summands[ranks.rank]]


def adapt(model: Model, options: ModelOptions) -> None:
    """Write an adapter of all modules into place 0, DoRA: its B and magnitudes are of the model's own rows."""
    plan = plan_adapter(model.layout, adapter_config(use_dora=True), tensors_of(model.layout))
    assert model.adapters is not None
    with open_weights(options) as weights:
        model.adapters.write(0, plan.load(weights, poisoned))
