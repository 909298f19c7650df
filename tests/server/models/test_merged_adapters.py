"""Adapters on the projections of families: what they do is what merging them into the model does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import PREFIX, adapter_config, plan_adapter, poisoned
from rigs.layer_oracle import Oracle, assert_close, serve
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.config import Scope
from deltaline_server.models.model import AdapterOptions, ModelOptions, load_model, open_weights

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN, LAYERS = 128, range(2)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "attn_implementation": "eager",
        "attention_bias": True,
    },
    "mamba": {"use_bias": True},
    "jamba": {"attn_layer_period": 2, "num_experts": 1, "attn_implementation": "eager"},
    "mamba2": {"use_bias": True},
    "bamba": {"attn_layer_indices": [1], "attn_implementation": "eager", "mlp_bias": True},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "attn_implementation": "eager"},
    "falcon_h1": {"attn_implementation": "eager", "ssm_multipliers": [0.5, 0.25, 1.5, 0.75, 1.25], "mlp_bias": True},
    "nemotron_h": {"layers_block_type": ["mlp", "full_attention"], "attn_implementation": "eager", "mlp_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention"], "attn_implementation": "eager", "conv_bias": True},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense"] * 2,
        "q_lora_rank": 24,
        "attn_implementation": "eager",
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "attn_implementation": "eager"},
}
MAMBA2 = pytest.mark.parametrize("oracle", ["mamba2"], indirect=True)
ATTENTION = pytest.mark.parametrize("oracle", ["qwen3_5_text"], indirect=True)


@pytest.fixture(params=KINDS)
def oracle(request: pytest.FixtureRequest, tmp_path: Path, write_checkpoint: Callable[..., Any]) -> Oracle:
    sizes = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 32, "layers": len(LAYERS)}
    return Oracle(write_checkpoint(tmp_path, request.param, **sizes, **KINDS[request.param]), tmp_path)


def draw(oracle: Oracle, *, is_dora: bool) -> dict[str, Tensor]:
    """Random A, B and magnitudes of all linear modules that take any, by PEFT's names; its own model has what they make
    of it."""
    tensors: dict[str, Tensor] = {}
    for name, module in oracle.model.named_modules():
        if not isinstance(module, torch.nn.Linear) or ".layers." not in name or name.endswith(".kv_b_proj"):
            continue
        weight, stem = module.weight, PREFIX + name
        a, b = torch.randn(3, weight.shape[1]) / weight.shape[1] ** 0.5, torch.randn(weight.shape[0], 3)
        merged = weight + 0.5 * b @ a
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        if is_dora:
            magnitude = torch.rand(weight.shape[0]) + 0.5
            tensors[f"{stem}.lora_magnitude_vector"] = magnitude
            merged = merged * (magnitude / merged.norm(dim=1))[:, None]
        weight.copy_(merged)
    return tensors


@pytest.mark.parametrize("is_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_does_what_merging_it_does(oracle: Oracle, device: str, is_dora: bool) -> None:
    """In a batch with the base model, which it leaves alone."""
    options = oracle.options(device, adapters=AdapterOptions(2, 8))
    served, hidden = serve(options), torch.randn(43, HIDDEN)
    base, tensors = oracle.run(LAYERS, hidden), draw(oracle, is_dora=is_dora)
    tuned = oracle.run(LAYERS, hidden)
    plan = plan_adapter(served.model.layout, adapter_config(r=3, lora_alpha=1.5, use_dora=is_dora), tensors)
    assert served.model.adapters is not None
    with open_weights(options) as source:
        served.model.adapters.write(1, plan.load(source if is_dora else None, poisoned))
    outputs = [
        served.step(torch.cat((part, part)), [1, 2], [len(part)] * 2, slots=[1, -1]).chunk(2)
        for part in hidden.split([40, 3])
    ]
    assert_close(torch.cat([first for first, _ in outputs]), tuned)
    assert_close(torch.cat([second for _, second in outputs]), base)
    assert float((tuned - base).norm() / base.norm()) > 0.1


@ATTENTION
def test_the_ranks_slots_hold_their_shares(oracle: Oracle) -> None:
    options = oracle.options(layers=range(1, 2), scope=Scope.MIXER, adapters=AdapterOptions(1, 8))
    tensors, outputs, hidden = draw(oracle, is_dora=False), [], torch.randn(5, HIDDEN)
    for rank in range(2):
        served = serve(replace(options, rank=rank, world_size=2))
        assert served.model.adapters is not None
        plan = plan_adapter(served.model.layout, adapter_config(r=3, lora_alpha=1.5), tensors)
        served.model.adapters.write(0, plan.load(None, poisoned))
        outputs.append(served.step(hidden, [1], [5], slots=[0]))
    assert_close(outputs[0] + outputs[1], oracle.run(range(1, 2), hidden, scope=Scope.MIXER))


@ATTENTION
def test_shapes_of_attentions_modules_are_known(oracle: Oracle) -> None:
    model = load_model(oracle.options(layers=range(1)))
    stem = f"{PREFIX}model.layers.1.self_attn.q_proj"
    tensors = {f"{stem}.lora_A.weight": torch.randn(3, HIDDEN), f"{stem}.lora_B.weight": torch.randn(7, 3)}
    with pytest.raises(ModelError, match=r"q_proj.lora_B.weight.*expected shape \[192, 3\], got \[7, 3\]"):
        plan_adapter(model.layout, adapter_config(), tensors)


@MAMBA2
@pytest.mark.parametrize("name", ["mixer.conv1d", "mixer.x_proj", "mlp.up_proj", "linear_attn.out_proj"])
def test_a_module_that_the_model_has_not_is_named(oracle: Oracle, name: str) -> None:
    stem = f"{PREFIX}backbone.layers.1.{name}"
    tensors = {f"{stem}.lora_A.weight": torch.randn(3, 8), f"{stem}.lora_B.weight": torch.randn(8, 3)}
    with pytest.raises(ModelError, match=rf"{name}.*found no such module"):
        plan_adapter(load_model(oracle.options()).layout, adapter_config(), tensors)


@pytest.mark.parametrize("name", ["shared_transformer.self_attn.q_proj", "linear"])
def test_a_shared_block_takes_no_adapter(tmp_path: Path, write_checkpoint: Callable[..., Any], name: str) -> None:
    write_checkpoint(tmp_path, "zamba2", hidden=32, head_dim=8, layers=2, layers_block_type=["mamba", "hybrid"])
    model = load_model(ModelOptions(torch.device("cpu"), model=tmp_path))
    stem = f"{PREFIX}model.layers.1.{name}"
    tensors = {f"{stem}.lora_A.weight": torch.randn(3, 32), f"{stem}.lora_B.weight": torch.randn(32, 3)}
    with pytest.raises(ModelError, match="expected no tensor of a shared block, which takes no adapters"):
        plan_adapter(model.layout, adapter_config(), tensors)


def test_modules_of_other_layers_of_a_hybrid_are_passed_over(
    tmp_path: Path, write_checkpoint: Callable[..., Any]
) -> None:
    kinds = ["linear_attention", "mlp", "full_attention"]
    write_checkpoint(tmp_path, "nemotron_h", hidden=32, head_dim=8, layers_block_type=kinds)
    model = load_model(ModelOptions(torch.device("cpu"), model=tmp_path, layers=range(1)))
    tensors = {}
    rows_of = {"1.mixer.up_proj": 384, "2.mixer.q_proj": 2 * 16, "0.mixer.in_proj": 4 * 8 * 2 + 2 * 2 * 8 + 4}
    for name, rows in rows_of.items():
        tensors[f"{PREFIX}backbone.layers.{name}.lora_A.weight"] = torch.randn(3, 32)
        tensors[f"{PREFIX}backbone.layers.{name}.lora_B.weight"] = torch.randn(rows, 3)
    raw = adapter_config(target_modules=["in_proj", "up_proj", "q_proj"])
    adapter = plan_adapter(model.layout, raw, tensors).load(None, poisoned)
    assert (len(adapter.weights), adapter.num_elsewhere) == (1, 2)
