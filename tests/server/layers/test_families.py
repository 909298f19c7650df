"""Families that are an entry of the table, whole, against transformers on the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, Oracle, assert_close, assert_same_life, serve
from safetensors.torch import load_file, save_file

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import ModelOptions, check_model, open_plan
from deltaline_server.models.servable import Auto, refusal

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN = 64
WRITTEN: dict[str, Any] = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 16, "layers": 3}
EAGER = {"attn_implementation": "eager", "num_attention_heads": 4, "num_key_value_heads": 2}
BAMBA = EAGER | {"attn_layer_indices": [1], "max_position_embeddings": 256}
GRANITE = EAGER | {
    "layer_types": ["mamba", "attention", "mamba"],
    "max_position_embeddings": 256,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
GRANITE_EXPERTS = GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}
OLMO = EAGER | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
FALCON = EAGER | {"max_position_embeddings": 256}
SCALES: dict[str, Any] = {"key_multiplier": 0.3, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9}
SCALES |= {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.35, 0.25, 1.4, 0.5, 0.7]}
SCALES |= {"mlp_multipliers": [0.88, 0.29]}
NEMOTRON = {"attn_implementation": "eager", "num_attention_heads": 4, "num_key_value_heads": 2, "key_heads": 4}
NEMOTRON |= {"mamba_head_dim": 32, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
NEMOTRON_EXPERTS = NEMOTRON | {"layers_block_type": ["moe", "linear_attention", "full_attention"]}
ZAMBA: dict[str, Any] = {"layers_block_type": ["hybrid", "linear_attention", "hybrid"], "attn_implementation": "eager"}
ZAMBA |= {"max_position_embeddings": 256}
LFM2 = EAGER | {"layer_types": ["conv", "full_attention", "conv"], "max_position_embeddings": 256}
KIMI = {"attn_implementation": "eager", "max_position_embeddings": 256}
KIMI |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
JAMBA = EAGER | {"max_position_embeddings": 256}
# The model type, and what differs from what write_checkpoint makes of it.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("bamba", BAMBA),
    "bamba-biases": ("bamba", BAMBA | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    "bamba-rotary": ("bamba", BAMBA | {"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 1.0}}),
    "bamba-one-key": ("bamba", BAMBA | {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "bamba-limits": ("bamba", BAMBA | {"mamba_conv_bias": False, "time_step_limit": (0.1, 0.9)}),
    "granite": ("granitemoehybrid", GRANITE),
    "granite-rotary": (
        "granitemoehybrid",
        GRANITE | {"position_embedding_type": "rope", "attention_bias": True, "rope_parameters": {"rope_theta": 50.0}},
    ),
    "granite-experts": ("granitemoehybrid", GRANITE_EXPERTS),
    "granite-odd-experts": ("granitemoehybrid", GRANITE_EXPERTS | {"num_local_experts": 13, "intermediate_size": 20}),
    "olmo": ("olmo_hybrid", OLMO),
    "olmo-rotary": ("olmo_hybrid", OLMO | {"rope_parameters": {"rope_theta": 50.0}, "attention_bias": True}),
    "falcon": ("falcon_h1", FALCON),
    "falcon-scales": ("falcon_h1", FALCON | SCALES),
    "falcon-norm": ("falcon_h1", FALCON | SCALES | {"mamba_rms_norm": True, "mamba_d_ssm": 96, "mamba_d_head": "auto"}),
    "falcon-norm-behind": ("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon-biases": (
        "falcon_h1",
        FALCON | SCALES | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_d_ssm": None},
    ),
    "falcon-out-bias": ("falcon_h1", FALCON | {"projectors_bias": True, "mamba_conv_bias": False}),
    "nemotron": ("nemotron_h", NEMOTRON),
    "nemotron-biases": ("nemotron_h", NEMOTRON | {"use_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "nemotron-experts": ("nemotron_h", NEMOTRON_EXPERTS | {"routed_scaling_factor": 2.5}),
    "nemotron-groups": (
        "nemotron_h",
        NEMOTRON_EXPERTS
        | {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False}
        | {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 50},
    ),
    "nemotron-latents": ("nemotron_h", NEMOTRON_EXPERTS | {"moe_latent_size": 24}),
    "nemotron-latents-biases": (
        "nemotron_h",
        NEMOTRON_EXPERTS | {"moe_latent_size": 40, "mlp_bias": True, "moe_shared_expert_intermediate_size": 50},
    ),
    "nemotron-experts-biases": ("nemotron_h", NEMOTRON_EXPERTS | {"mlp_bias": True}),
    "zamba": ("zamba2", ZAMBA),
    "zamba-adapters": (
        "zamba2",
        ZAMBA | {"use_shared_attention_adapter": True, "use_mem_rope": True, "rope_parameters": {"rope_theta": 50.0}},
    ),
    "zamba-two-blocks": (
        "zamba2",
        ZAMBA | {"layers_block_type": ["hybrid"] * 3, "num_mem_blocks": 2, "add_bias_linear": True},
    ),
    "zamba-few-heads": ("zamba2", ZAMBA | {"num_key_value_heads": 2, "use_mem_rope": True}),
    "mamba": ("mamba", {}),
    "mamba-biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "state_size": 5}),
    "mamba-wide": ("mamba", {"expand": 3, "time_step_rank": "auto", "residual_in_fp32": False}),
    "falcon-mamba": ("falcon_mamba", {"mixer_rms_eps": 1e-3}),
    "jamba": ("jamba", JAMBA),
    "jamba-dense": ("jamba", JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "mamba_d_state": 24}),
    "jamba-experts": (
        "jamba",
        JAMBA | {"num_experts": 13, "num_experts_per_tok": 3, "expert_layer_period": 1, "mamba_conv_bias": False},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2-biases": ("lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "rope_parameters": {"rope_theta": 50.0}}),
    "lfm2-adjusted": (
        "lfm2",
        LFM2 | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 24},
    ),
    "lfm2-experts": ("lfm2_moe", LFM2 | {"routed_scaling_factor": 2.5}),
    "lfm2-odd-experts": (
        "lfm2_moe",
        LFM2
        | {"num_experts": 13, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": False}
        | {"use_expert_bias": False, "num_dense_layers": 0, "layer_types": ["conv", "conv", "full_attention"]},
    ),
    "kimi": ("kimi_linear", KIMI),
    "kimi-ranks": (
        "kimi_linear",
        KIMI
        | {"q_lora_rank": 24, "qk_rope_head_dim": 0, "num_attention_heads": 3, "num_key_value_heads": 3}
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
    "kimi-groups": (
        "kimi_linear",
        KIMI
        | {"num_experts": 12, "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3}
        | {"moe_renormalize": False, "num_shared_experts": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "olmo-positive": ("olmo_hybrid", OLMO | {"linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3}),
}
ALL = range(3)


@pytest.fixture(scope="module", params=KINDS)
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    model_type, changes = KINDS[request.param]
    return Oracle(write_checkpoint(directory, model_type, **WRITTEN, **changes), directory)


def test_prefill_decode_verify_and_commit(oracle: Oracle, device: str) -> None:
    assert_same_life(oracle, device, ALL)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("length", [1, 4, 23])
def test_each_layer_by_itself(oracle: Oracle, device: str, scope: Scope, length: int) -> None:
    """Of an MLP alone there is no mixer; what takes embeddings begins a model."""
    config = ModelConfig.from_directory(oracle.directory)
    spans = [range(i, i + 1) for i in ALL if refusal(config, config.layers[i], scope, i) is None]
    if not spans:
        assert scope is Scope.MIXER
        return
    hidden = torch.randn(length, HIDDEN)
    served = serve(oracle.options(device, scope=scope, spans=spans))
    for i, span in enumerate(spans):
        assert_close(served.step(hidden, [1], [length], span=i), oracle.run(span, hidden, scope=scope))


def test_a_row_s_neighbours_do_not_matter(oracle: Oracle, device: str) -> None:
    served, again, lengths = (*(serve(oracle.options(device)) for _ in range(2)), [1, MAX_DRAFT, 30])
    hidden = torch.randn(sum(lengths), HIDDEN)
    changed = torch.cat((torch.randn(1 + MAX_DRAFT, HIDDEN), hidden[1 + MAX_DRAFT :]))
    first, second = (one.step(x, [1, 2, 3], lengths) for one, x in ((served, hidden), (again, changed)))
    assert torch.equal(first[1 + MAX_DRAFT :], second[1 + MAX_DRAFT :])


def test_the_config_alone_is_served(oracle: Oracle) -> None:
    """Weights drawn from a seed have the names and shapes of the checkpoint's."""
    options = oracle.options(model=None, random_init=oracle.directory / "config.json")
    check_model(options)
    with open_plan(options) as drawn, open_plan(oracle.options()) as stored:
        assert (drawn.spans, drawn.config) == (stored.spans, stored.config)


def test_olmo_hybrid_as_it_is_published(tmp_path: Path, write_checkpoint: Callable[..., Any], device: str) -> None:
    """Its convolutions are cut where q, k and v are; a norm of attention has another name than transformers writes."""
    oracle = Oracle(write_checkpoint(tmp_path, "olmo_hybrid", **WRITTEN, **OLMO), tmp_path)
    hidden, file = torch.randn(20, HIDDEN), tmp_path / "model.safetensors"
    tensors = load_file(file)
    written = serve(oracle.options(device)).step(hidden, [1], [20])
    for i in ALL:
        name = f"model.layers.{i}."
        if (convolutions := [f"{name}linear_attn.{part}_conv1d.weight" for part in "qkv"])[0] in tensors:
            whole = torch.cat([tensors[part] for part in convolutions])
            tensors |= zip(convolutions, (part.contiguous() for part in whole.split((32, 32, 64))), strict=True)
        else:
            tensors[name + "post_attention_layernorm.weight"] = tensors.pop(name + "feedforward_layer_norm.weight")
    save_file(tensors, file)
    assert torch.equal(serve(oracle.options(device)).step(hidden, [1], [20]), written)


def test_what_is_normalised_over_all_heads_is_not_shared_out(
    tmp_path: Path, write_checkpoint: Callable[..., Any]
) -> None:
    oracle = Oracle(write_checkpoint(tmp_path, "olmo_hybrid", **WRITTEN, **OLMO), tmp_path)
    with pytest.raises(
        ModelError, match="--tensor-parallel: expected 1, as queries are normalised over all heads, got 2"
    ):
        check_model(oracle.options(world_size=2))
    check_model(oracle.options(world_size=2, scope=Scope.MIXER, layers=range(1)))


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_as_mamba_ssm_writes_it(
    tmp_path: Path, write_checkpoint: Callable[..., Any], device: str, groups: int
) -> None:
    """The names of tensors are those of transformers, keys of the config are not; its norm takes groups one by one."""
    zamba2 = pytest.importorskip("transformers.models.zamba2.modeling_zamba2", reason="its norm is the oracle's")
    oracle = Oracle(write_checkpoint(tmp_path, "mamba2", **WRITTEN, key_heads=groups), tmp_path)
    for layer in oracle.model.base_model.layers:
        norm = zamba2.Zamba2RMSNormGated(2 * HIDDEN, group_size=2 * HIDDEN // groups, eps=1e-5)
        norm.weight, layer.mixer.norm = layer.mixer.norm.weight, norm
    (tmp_path / "config.json").write_text(json.dumps(mamba_ssm(headdim=32, d_state=16, ngroups=groups)))
    served, hidden = serve(oracle.options(device)), torch.randn(50, HIDDEN)
    ours = [served.step(hidden[:40], [1], [40]), served.step(hidden[40:41], [1], [1])]
    ours.append(served.step(hidden[41:45], [1], [MAX_DRAFT], verify=True))
    ours.append(served.step(hidden[45:], [1], [5], accepted=MAX_DRAFT))
    assert_close(torch.cat(ours), oracle.run(ALL, hidden))


def mamba_ssm(**own: Any) -> dict[str, Any]:
    """A config as mamba-ssm writes it, with these keys of its `ssm_cfg`."""
    keys = {"d_model": HIDDEN, "d_intermediate": 0, "n_layer": len(ALL), "vocab_size": 8, "attn_layer_idx": []}
    return keys | {"ssm_cfg": {"layer": "Mamba2", **own}, "rms_norm": True, "residual_in_fp32": True}


@pytest.mark.parametrize(
    "name", ["BambaConfig", "GraniteMoeHybridConfig", "OlmoHybridConfig", "FalconMambaConfig", "JambaConfig"]
)
def test_the_sizes_of_the_models_that_transformers_names_are_served(tmp_path: Path, name: str) -> None:
    """Its defaults are those of Bamba 9.8B, Granite, Olmo-Hybrid 7B, and Jamba; Falcon Mamba has a small model's."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: the sizes are its own")
    getattr(transformers, name)().save_pretrained(tmp_path)
    options = ModelOptions(torch.device("cpu"), random_init=tmp_path / "config.json", spans=Auto.AUTO)
    check_model(options)
    with open_plan(options) as plan:
        assert plan.spans == (range(32),) and plan.left_out == ""
