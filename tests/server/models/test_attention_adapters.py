"""Adapters on a hybrid's projections: what they do is what merging them into the checkpoint does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import PREFIX, adapter_config
from safetensors.torch import save
from server.layers.test_attention import HIDDEN, HYBRID, MAX_DRAFT, Oracle, assert_close
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.tensor_file import MemoryBytes, TensorFile
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.config import Scope
from deltaline_server.models.model import AdapterOptions, load_model, open_weights

SIZES = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 16, "layer_types": HYBRID, "num_attention_heads": 6}
LENGTHS = [40, 3]


@pytest.fixture
def oracle(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> Oracle:
    model = write_checkpoint(
        tmp_path, "qwen3_5_text", **SIZES, num_key_value_heads=2, attn_implementation="eager", attention_bias=True
    )
    return Oracle(model, tmp_path)


def draw(oracle: Oracle, *, is_dora: bool) -> dict[str, Tensor]:
    """Random A, B and magnitudes of all linear modules, by PEFT's names; its own model has what they make of it."""
    tensors: dict[str, Tensor] = {}
    for name, module in oracle.model.named_modules():
        if not isinstance(module, torch.nn.Linear) or ".layers." not in name:
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


def plan_of(model: Any, raw: dict[str, Any], tensors: dict[str, Tensor]) -> AdapterPlan:
    file = TensorFile(MemoryBytes(bytearray(save(tensors)), "adapter_model.safetensors"))
    return AdapterPlan(AdapterConfig.parse(json.dumps(raw).encode()), file, model.layout)


@pytest.mark.parametrize("is_dora", [False, True], ids=["lora", "dora"])
@torch.inference_mode()
def test_an_adapter_does_what_merging_it_does(oracle: Oracle, is_dora: bool) -> None:
    options = oracle.options(adapters=AdapterOptions(2, 8))
    model, hidden = load_model(options), torch.randn(sum(LENGTHS), HIDDEN)
    base = oracle.run(range(4), Scope.BLOCK, hidden[:40], 0, oracle.cache())
    tensors = draw(oracle, is_dora=is_dora)
    plan = plan_of(model, adapter_config(r=3, lora_alpha=1.5, use_dora=is_dora), tensors)
    assert model.adapters is not None
    with open_weights(options) as source:
        adapter = plan.load(source if is_dora else None, lambda size: torch.full((size,), 0xFF, dtype=torch.uint8))
    assert adapter.num_elsewhere == 0 and len(adapter.weights) == 4 * 4
    model.adapters.write(1, adapter)
    tuned = oracle.run(range(4), Scope.BLOCK, hidden, 0, oracle.cache())

    pool = model.make_pool(StateOptions(2, MAX_DRAFT, page_size=64))
    slots, ours = torch.tensor([1, -1], dtype=torch.int32), []
    new_pages = torch.tensor([[1, 2], [0, 0], [1, 2]], dtype=torch.int32)
    for part, read, at in zip(hidden.split(LENGTHS), ([0, 0], [1, 2]), (0, 40), strict=True):
        n = len(part)
        rows = Rows.build(
            [n, n], read, [1, 2], [n, n], [0, 0], [0, 0], max_short=MAX_DRAFT, device="cpu", position=[at, at]
        )
        made = model.forward(0, torch.cat((part, part)), rows, pool, slots, None if at else new_pages)
        ours.append(made.split([n, n]))
    assert_close(torch.cat([first for first, _ in ours]), tuned)
    assert_close(ours[0][1], base)
    assert float((tuned[:40] - base).norm() / base.norm()) > 0.1


@torch.inference_mode()
def test_the_ranks_slots_hold_their_shares(oracle: Oracle) -> None:
    options = oracle.options(layers=range(1, 2), scope=Scope.MIXER, adapters=AdapterOptions(1, 8))
    tensors, outputs = draw(oracle, is_dora=False), []
    hidden = torch.randn(5, HIDDEN)
    for rank in range(2):
        model = load_model(replace(options, rank=rank, world_size=2))
        assert model.adapters is not None
        plan = plan_of(model, adapter_config(r=3, lora_alpha=1.5), tensors)
        model.adapters.write(0, plan.load(None, lambda size: torch.zeros(size, dtype=torch.uint8)))
        rows = Rows.build([5], [0], [1], [5], [0], [0], max_short=MAX_DRAFT, device="cpu")
        pages = torch.tensor([[1], [0], [1]], dtype=torch.int32)
        pool = model.make_pool(StateOptions(1, MAX_DRAFT))
        outputs.append(model.forward(0, hidden, rows, pool, torch.zeros(1, dtype=torch.int32), pages))
    tuned = oracle.run(range(1, 2), Scope.MIXER, hidden, 0, oracle.cache())
    assert_close(outputs[0] + outputs[1], tuned)


def test_shapes_of_attentions_modules_are_known(oracle: Oracle) -> None:
    model = load_model(oracle.options(layers=range(1)))
    stem = f"{PREFIX}model.layers.1.self_attn.q_proj"
    tensors = {f"{stem}.lora_A.weight": torch.randn(3, HIDDEN), f"{stem}.lora_B.weight": torch.randn(7, 3)}
    with pytest.raises(ModelError, match=r"q_proj.lora_B.weight.*expected shape \[192, 3\], got \[7, 3\]"):
        plan_of(model, adapter_config(), tensors)
