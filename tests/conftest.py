"""What every test shares: the devices, checkpoints written by transformers, and which tests this machine runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the exhaustive sweeps too")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}
    logging.getLogger("asyncio").addFilter(_is_of_a_test)


def _is_of_a_test(record: logging.LogRecord) -> bool:
    """Whether a record isn't gRPC's about a call of an earlier test, whose loop is closed. pytest keeps records; the
    traceback in that one has frames of whatever test it came into, and what a test looks for may live on in them."""
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out sweeps unless asked for, tests marked `gpu` on a machine without a CUDA device, and among parallel
    workers those marked `alone`."""
    reasons = {item: reason for item in items if (reason := _why_left_out(item))}
    if reasons:
        config.hook.pytest_deselected(items=list(reasons))
        items[:] = [item for item in items if item not in reasons]
    config.stash[LEFT_OUT] = dict(Counter(reasons.values()))
    if hasattr(config, "workeroutput"):  # of pytest-xdist: what a worker tells at its end
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]


def _why_left_out(item: pytest.Item) -> str:
    if item.get_closest_marker("sweep") and not item.config.getoption("--all"):
        return "are exhaustive sweeps: --all runs them"
    if item.get_closest_marker("gpu") and not _has_cuda():
        return "need a CUDA device; torch finds none"
    if item.get_closest_marker("alone") and hasattr(item.config, "workerinput"):
        return "measure time, which other workers take: -m alone runs them by themselves"
    return ""


@cache
def _has_cuda() -> bool:
    import torch  # only here: the tests of the client run where torch is not installed

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker left out; each one collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in sorted(config.stash[LEFT_OUT].items()):
        terminalreporter.write_line(f"left out {count} tests that {reason}")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every kind of device that the service runs on."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Any]:
    """A function that makes transformers write a small checkpoint; skips where transformers is not installed."""
    pytest.importorskip("transformers", reason="transformers is not installed: it writes and runs the checkpoints")
    return _write_checkpoint


def _write_checkpoint(
    directory: Path,
    model_type: str,
    *,
    hidden: int = 256,
    intermediate: int = 384,
    layers: int = 4,
    key_heads: int = 2,
    value_heads: int = 4,
    head_dim: int = 64,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:
    """Write config and weights of a model whose weights make mistakes show; return the transformers model.

    All layers are Gated DeltaNet with a dense MLP (with experts, where the model type has no other), or a Mamba2 mixer
    alone, unless `overrides` (of the language model's config) say otherwise. Of Mamba2, key_heads are groups and
    value_heads heads; head_dim is the state's, and of nemotron_h the heads' too. `model.base_model.layers` are its
    layers, but for qwen3_5 and qwen3_5_moe.
    """
    import torch  # only here, like transformers and what imports it: most tests need neither
    import transformers
    from rigs.drawn_weights import draw_weights

    config: dict[str, Any] = {"vocab_size": 8, "hidden_size": hidden}
    mamba = {
        "num_hidden_layers": layers,
        "chunk_size": 32,  # the oracle's own: of larger ones it computes the whole of few tokens
        "num_heads": value_heads,
        "head_dim": 2 * hidden // value_heads,
    }
    nemotron = {
        "layers_block_type": ["linear_attention"] * layers,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "chunk_size": 32,
        "mamba_num_heads": value_heads,
        "mamba_head_dim": head_dim,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": intermediate,
        # Its decode does not clamp time steps, as its prefill does: no step of these weights is as small.
        "time_step_min": 1e-6,
    }
    linear = {
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "layer_types": ["linear_attention"] * layers,
    }
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }
    beside_attention = {
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_n_heads": value_heads,
        "mamba_d_head": 2 * hidden // value_heads,
        "mamba_d_state": head_dim,
        "mamba_n_groups": key_heads,
        "mamba_chunk_size": 32,
    }
    short_convolutions = {
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv"] * layers,
        "pad_token_id": None,  # its own are beyond a small vocabulary
        "eos_token_id": None,
    }
    latents = {
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": value_heads,
        "num_key_value_heads": value_heads,
        "kv_lora_rank": 2 * head_dim,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "v_head_dim": head_dim,
        "linear_num_heads": value_heads,
        "linear_head_dim": head_dim,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "layer_types": ["linear_attention"] * layers,
        "pad_token_id": None,  # its own are beyond a small vocabulary
        "eos_token_id": None,
        "bos_token_id": None,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": hidden}
    mamba1 = {"num_hidden_layers": layers, "time_step_rank": 6}
    if model_type == "mamba":
        made = transformers.MambaConfig(**config | mamba1 | overrides)
    elif model_type == "falcon_mamba":
        made = transformers.FalconMambaConfig(**config | mamba1 | overrides)
    elif model_type == "jamba":
        sizes = {"intermediate_size": intermediate, "num_experts": 6, "mamba_dt_rank": 6, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_period": 3, "attn_layer_offset": 1}
        sizes |= {"expert_layer_offset": 0}
        made = transformers.JambaConfig(**config | sizes | overrides)
    elif model_type == "mamba2":
        config |= mamba | {"n_groups": key_heads, "state_size": head_dim}
        made = transformers.Mamba2Config(**config | overrides)
    elif model_type == "bamba":
        made = transformers.BambaConfig(**config | beside_attention | {"intermediate_size": intermediate} | overrides)
    elif model_type == "zamba2":
        sizes = {"num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": intermediate}
        sizes |= {
            "n_mamba_heads": value_heads,
            "mamba_d_state": head_dim,
            "mamba_ngroups": key_heads,
            "adapter_rank": 4,
        }
        # As for nemotron_h.
        made = transformers.Zamba2Config(**config | sizes | {"chunk_size": 32, "time_step_min": 1e-6} | overrides)
    elif model_type == "lfm2":
        sizes = {"block_auto_adjust_ff_dim": False}
        made = transformers.Lfm2Config(**config | short_convolutions | sizes | overrides)
    elif model_type == "lfm2_moe":
        sizes = {key: value for key, value in experts.items() if not key.startswith("shared")}
        made = transformers.Lfm2MoeConfig(**config | short_convolutions | sizes | {"num_dense_layers": 1} | overrides)
    elif model_type == "glm5_next":
        text = {key: value for key, value in latents.items() if key not in ("num_experts", "num_experts_per_token")}
        text |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "q_lora_rank": head_dim, "qk_rope_head_dim": 0}
        text |= {"index_topk": 64, "index_kpool": 4, "index_n_heads": 2, "index_head_dim": head_dim}
        text |= {"mlp_layer_types": ["dense", *["sparse"] * (layers - 1)], "hc_mult": 2, "hc_sinkhorn_iters": 3}
        vision |= {"projection_intermediate_size": 32}
        made = transformers.Glm5NextConfig(text_config=config | text | overrides, vision_config=vision)
    elif model_type == "kimi_linear":
        made = transformers.KimiLinearConfig(**config | latents | overrides)
    elif model_type == "falcon_h1":
        sizes = {"intermediate_size": intermediate, "head_dim": 16, "mamba_d_ssm": 2 * hidden}
        made = transformers.FalconH1Config(**config | beside_attention | sizes | overrides)
    elif model_type == "granitemoehybrid":
        mlp = {"num_local_experts": 0, "intermediate_size": 32, "shared_intermediate_size": intermediate}
        made = transformers.GraniteMoeHybridConfig(**config | beside_attention | mlp | overrides)
    elif model_type == "olmo_hybrid":
        tokens = {"pad_token_id": None, "eos_token_id": None}  # its own are beyond a small vocabulary
        made = transformers.OlmoHybridConfig(**config | linear | tokens | overrides)
    elif model_type == "nemotron_h":
        config |= nemotron | {"n_groups": key_heads, "ssm_state_size": head_dim}
        made = transformers.NemotronHConfig(**config | overrides)
    elif model_type == "qwen3_next":
        made = transformers.Qwen3NextConfig(**config | linear | experts | {"num_experts": 0} | overrides)
    elif model_type == "qwen3_5_moe_text":
        made = transformers.Qwen3_5MoeTextConfig(**config | linear | experts | overrides)
    elif model_type == "qwen3_5_text":
        made = transformers.Qwen3_5TextConfig(**config | linear | overrides)
    elif model_type == "qwen3_5_moe":
        text = config | linear | experts | overrides
        made = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    else:
        made = transformers.Qwen3_5Config(text_config=config | linear | overrides, vision_config=vision)
    classes = {
        "mamba": "MambaForCausalLM",
        "falcon_mamba": "FalconMambaForCausalLM",
        "jamba": "JambaForCausalLM",
        "mamba2": "Mamba2ForCausalLM",
        "bamba": "BambaForCausalLM",
        "falcon_h1": "FalconH1ForCausalLM",
        "zamba2": "Zamba2ForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "olmo_hybrid": "OlmoHybridForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM",
        "glm5_next": "Glm5NextForConditionalGeneration",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }
    model: Any = getattr(transformers, classes[model_type])(made)
    draw_weights(model, model_type, seed)
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
