"""An adapter of all modules of a model, drawn, in the place that a rank has for it."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save
from torch import Tensor

from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.checkpoints.tensor_file import MemoryBytes, TensorFile
from deltaline_server.models.model import Model, ModelOptions, open_weights

RANK = 8
_CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear", "bias": "none"}


def adapt(model: Model, options: ModelOptions) -> None:
    """Write this rank's share of the adapter into place 0; mutates the model's adapters."""
    source, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for layer in model.layout.layers:
        for module in model.layout.modules(layer):
            stem = f"base_model.model.model.layers.{layer}.{module.name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, module.columns, generator=source) / module.columns**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(module.rows, RANK, generator=source) / RANK**0.5
    file = TensorFile(MemoryBytes(bytearray(save(tensors)), "adapter_model.safetensors"))
    plan = AdapterPlan(AdapterConfig.parse(json.dumps(_CONFIG).encode()), file, model.layout)
    assert model.adapters is not None
    with open_weights(options) as weights:
        model.adapters.write(0, plan.load(weights, lambda size: torch.empty(size, dtype=torch.uint8)))
