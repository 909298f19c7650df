"""Adapters on the projections of Mamba2 mixers: what they do is what merging them into the checkpoint does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import PREFIX, adapter_config
from safetensors.torch import save
from server.layers.test_layers import HIDDEN, MAX_DRAFT, Oracle, assert_close
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.tensor_file import MemoryBytes, TensorFile
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.config import Scope
from deltaline_server.models.model import AdapterOptions, Model, ModelOptions, load_model, open_weights

LAYERS = 2
RANKS = {"in_proj": 5, "out_proj": 3}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def oracle(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> Oracle:
    return Oracle(write_checkpoint(tmp_path, "mamba2", hidden=HIDDEN, layers=LAYERS, use_bias=True), tmp_path)


def draw(oracle: Oracle, *, is_dora: bool) -> dict[str, Tensor]:
    """Random A, B and magnitudes of all linear modules, by PEFT's names; its own model has what they make of it."""
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(oracle.layers):
        for name, rank in RANKS.items():
            weight = getattr(layer.mixer, name).weight
            stem = f"{PREFIX}backbone.layers.{i}.mixer.{name}"
            a, b = torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5, torch.randn(weight.shape[0], rank)
            merged = weight + 0.5 * b @ a
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            if is_dora:
                magnitude = torch.rand(weight.shape[0]) + 0.5
                tensors[f"{stem}.lora_magnitude_vector"] = magnitude
                merged = merged * (magnitude / merged.norm(dim=1))[:, None]
            weight.copy_(merged)
    return tensors


def put(options: ModelOptions, model: Model, raw: dict[str, Any], tensors: dict[str, Tensor], slot: int) -> None:
    """Load an adapter into a slot, as a server does."""
    file = TensorFile(MemoryBytes(bytearray(save(tensors)), "adapter_model.safetensors"))
    plan = AdapterPlan(AdapterConfig.parse(json.dumps(raw).encode()), file, model.layout)
    assert model.adapters is not None
    with open_weights(options) as base:
        source = base if plan.needs_base else None
        adapter = plan.load(source, lambda size: torch.full((size,), 0xFF, dtype=torch.uint8))
    model.adapters.write(slot, adapter)


@pytest.mark.parametrize("is_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_does_what_merging_it_does(oracle: Oracle, device: str, is_dora: bool) -> None:
    options = ModelOptions(torch.device(device), model=oracle.directory, adapters=AdapterOptions(2, 8))
    model, hidden = load_model(options), torch.randn(41, HIDDEN)
    base = oracle.run(range(LAYERS), Scope.BLOCK, hidden, oracle.cache())
    raw = adapter_config(r=5, lora_alpha=2.5, rank_pattern={"out_proj": 3}, alpha_pattern={"out_proj": 1.5})
    put(options, model, raw | {"use_dora": is_dora}, draw(oracle, is_dora=is_dora), slot=1)
    tuned = oracle.run(range(LAYERS), Scope.BLOCK, hidden, oracle.cache())

    pool = model.make_pool(StateOptions(2, MAX_DRAFT))
    slots = torch.tensor([1, -1], dtype=torch.int32, device=device)
    outputs: list[list[Tensor]] = [[], []]
    for part, read_line in zip(hidden.split([40, 1]), ([0, 0], [1, 2]), strict=True):
        n = len(part)
        rows = Rows.build(
            [n, n], read_line, [1, 2], [n, n], [0, 0], [0, 0], max_short=MAX_DRAFT, device=torch.device(device)
        )
        made = model.forward(0, torch.cat([part, part]).to(device), rows, pool, slots).cpu()
        for output, own in zip(outputs, made.split([n, n]), strict=True):
            output.append(own)
    assert_close(torch.cat(outputs[0]), tuned)
    assert_close(torch.cat(outputs[1]), base)
    assert float((tuned - base).norm() / base.norm()) > 0.1


@pytest.mark.parametrize("name", ["mixer.conv1d", "mixer.x_proj", "mlp.up_proj", "linear_attn.out_proj"])
def test_a_module_that_the_model_has_not_is_named(oracle: Oracle, name: str) -> None:
    model = load_model(oracle.options("cpu"))
    stem = f"{PREFIX}backbone.layers.1.{name}"
    tensors = {f"{stem}.lora_A.weight": torch.randn(3, 8), f"{stem}.lora_B.weight": torch.randn(8, 3)}
    with pytest.raises(ModelError, match=rf"{name}.*found no such module"):
        AdapterPlan(
            AdapterConfig(adapter_config()), TensorFile(MemoryBytes(bytearray(save(tensors)), "a")), model.layout
        )


def test_modules_of_other_layers_of_a_hybrid_are_passed_over(
    tmp_path: Path, write_checkpoint: Callable[..., Any]
) -> None:
    kinds = ["linear_attention", "mlp", "full_attention"]
    write_checkpoint(tmp_path, "nemotron_h", hidden=32, head_dim=8, layers_block_type=kinds)
    model = load_model(ModelOptions(torch.device("cpu"), model=tmp_path, layers=range(1)))
    tensors = {}
    for name in ("1.mixer.up_proj", "2.mixer.q_proj", "0.mixer.in_proj"):
        rows, columns = (4 * 8 * 2 + 2 * 2 * 8 + 4, 32) if name.startswith("0") else (16, 32)
        tensors[f"{PREFIX}backbone.layers.{name}.lora_A.weight"] = torch.randn(3, columns)
        tensors[f"{PREFIX}backbone.layers.{name}.lora_B.weight"] = torch.randn(rows, 3)
    file = TensorFile(MemoryBytes(bytearray(save(tensors)), "adapter_model.safetensors"))
    raw = adapter_config(target_modules=["in_proj", "up_proj", "q_proj"])
    plan = AdapterPlan(AdapterConfig(raw), file, model.layout)
    adapter = plan.load(None, lambda size: torch.zeros(size, dtype=torch.uint8))
    assert (len(adapter.weights), adapter.num_elsewhere) == (1, 2)


def test_peft_runs_the_same_adapter(oracle: Oracle, device: str, tmp_path: Path) -> None:
    """On in_proj: PEFT refuses out_proj of such models, whose own kernels would pass its adapter over."""
    peft = pytest.importorskip("peft", reason="peft is not installed: it makes, writes and runs the adapter")
    options = ModelOptions(torch.device(device), model=oracle.directory, adapters=AdapterOptions(1, 8))
    model, hidden = load_model(options), torch.randn(20, HIDDEN)
    with torch.inference_mode(False):
        made = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["in_proj"], use_dora=True, init_lora_weights=False)
        peft.get_peft_model(oracle.model, made).save_pretrained(tmp_path / "tuned")
    from safetensors.torch import load_file

    raw = json.loads((tmp_path / "tuned/adapter_config.json").read_text())
    put(options, model, raw, load_file(tmp_path / "tuned/adapter_model.safetensors"), slot=0)
    rows = Rows.build([20], [0], [1], [20], [0], [0], max_short=MAX_DRAFT, device=torch.device(device))
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    ours = model.forward(0, hidden.to(device), rows, model.make_pool(StateOptions(1, MAX_DRAFT)), slots).cpu()
    assert_close(ours, oracle.run(range(LAYERS), Scope.BLOCK, hidden, oracle.cache()))
