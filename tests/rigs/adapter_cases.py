"""Small models and adapters for tests: base weights in memory, and adapters as PEFT writes them.

Knows the files' format by itself, not from the server: what it writes is what the server has to read.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from deltaline_server.adapters.copier import AdapterCopier
from deltaline_server.adapters.files import AdapterPlan, BaseRows
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.checkpoints.checkpoint import TensorInfo
from deltaline_server.checkpoints.tensor_file import MemoryBytes, TensorFile
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_places import AdapterStore
from deltaline_server.models.lora_weights import Adapter, AdapterShape, AdapterWeights
from deltaline_server.models.parts import LayerKind, MixerKind, MlpKind
from deltaline_server.models.weights import expected_tensors

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_experts": 0,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}
NEXT = ModelConfig.from_mapping(CONFIG)
QWEN3_5 = ModelConfig.from_mapping(CONFIG | {"model_type": "qwen3_5_text"})
IN_PROJ = {
    "qwen3_next": ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"],
    "qwen3_5_text": [f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")],
}
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
PREFIX = "base_model.model."


class MemoryTensors:
    """Tensors in memory, as a source."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo("memory", tuple(tensor.shape), "I8" if tensor.dtype is torch.int8 else "F32")

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        tensor = self.tensors[name]
        return tensor[rows] if tensor.ndim == 1 else tensor[rows, columns]


def modules(config: ModelConfig) -> list[str]:
    """The linear modules of a layer with a Gated DeltaNet mixer."""
    return [*IN_PROJ[config.model_type], "linear_attn.out_proj", *MLP]


def base_weights(config: ModelConfig, layers: int = 2) -> MemoryTensors:
    """The weights of the first layers of a config."""
    shapes = expected_tensors(config, LayerKind(MixerKind.GATED_DELTA_NET, MlpKind.DENSE), Scope.BLOCK)
    return MemoryTensors(
        {f"model.layers.{i}.{name}": torch.randn(shape) for i in range(layers) for name, shape in shapes.items()}
    )


def adapter_config(**changes: Any) -> dict[str, Any]:
    """A config as PEFT 0.21 writes it, for all modules of the layers' mixers and MLPs."""
    config: dict[str, Any] = {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "base",
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 6,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 3,
        "rank_pattern": {},
        "revision": None,
        "target_modules": "all-linear",
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    }
    return config | changes


def adapter_tensors(
    base: MemoryTensors,
    names: list[str],
    layers: range = range(2),
    ranks: Mapping[str, int] | None = None,
    rank: int = 3,
) -> dict[str, Tensor]:
    """Random A and B of modules, by PEFT's names; `ranks` by module's name where they differ."""
    tensors = {}
    for layer in layers:
        for name in names:
            rows, columns = base.tensors[f"model.layers.{layer}.{name}.weight"].shape
            stem = f"{PREFIX}model.layers.{layer}.{name}"
            size = (ranks or {}).get(name, rank)
            tensors[f"{stem}.lora_A.weight"] = torch.randn(size, columns)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, size)
    return tensors


def tensors_of(layout: AdapterLayout) -> dict[str, Tensor]:
    """Random A, B and DoRA's magnitudes, by PEFT's names, of all modules that a model serves: of its own rows."""
    tensors: dict[str, Tensor] = {}
    source = torch.Generator().manual_seed(0)
    for layer in layout.layers:
        for module in layout.modules(layer):
            stem = f"{PREFIX}model.layers.{layer}.{module.name}"
            a = torch.randn(3, module.columns, generator=source) / module.columns**0.5
            tensors |= {
                f"{stem}.lora_A.weight": a,
                f"{stem}.lora_B.weight": torch.randn(module.rows, 3, generator=source),
            }
            tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(module.rows, generator=source) + 0.5
    return tensors


def with_magnitudes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with DoRA's beside every B."""
    more = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("lora_B.weight"):
            more[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.rand(len(tensor)) + 0.5
    return more


def merge_into(weight: Tensor, one: AdapterWeights) -> None:
    """Change a served projection's weight `[out, in]` as an adapter does; mutates it."""
    begin = 0
    for i, size in enumerate(one.sizes):
        rows, rank = slice(begin, begin + size), int(one.ranks[i])
        begin += size
        assert one.a[i].shape[0] == rank and not one.b[rank:, rows].any()
        weight[rows] += one.scales[i].item() * one.b[:rank, rows].t().to(weight.dtype) @ one.a[i].to(weight.dtype)
    assert begin == len(weight)
    if one.factors is not None:
        weight *= one.factors[:, None]


def random_adapter(layout: AdapterLayout, seed: int, max_rank: int = 8, *, dora: bool = False) -> Adapter:
    """An adapter whose slices have ranks of their own, some none; large enough to show. Pinned for a GPU."""
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for layer in layout.layers:
        for packed, slices in layout.projections(layer).items():
            ranks = torch.randint(0, max_rank + 1, (len(slices.sizes),), generator=generator)
            ranks[seed % len(ranks)] = max_rank
            sizes = tuple(ranks.tolist())
            shape = AdapterShape(slices.inputs, slices.sizes, sizes, dora, layout.placement.dtype)
            memory = torch.empty(shape.num_bytes, dtype=torch.uint8, pin_memory=layout.placement.device.type == "cuda")
            one = shape.lay_out(layer, packed, memory)
            begin = 0
            for a, size, rank in zip(one.a, slices.sizes, sizes, strict=True):
                a.copy_(torch.randn(a.shape, generator=generator) / slices.inputs**0.5)
                b = torch.randn(rank, size, generator=generator)
                one.b[:rank, begin : begin + size] = (b / max(1, rank) ** 0.5).to(one.b.dtype)
                begin += size
            one.scales.copy_(torch.rand(len(sizes), generator=generator) + 0.5)
            if one.factors is not None:
                one.factors.copy_(torch.rand(sum(slices.sizes), generator=generator) + 0.5)
            weights.append(one)
    return Adapter(seed.to_bytes(32, "little"), max_rank, tuple(weights), 0, torch.empty(0, dtype=torch.uint8))


def fill_slots(store: AdapterStore, adapters: Mapping[int, Adapter]) -> None:
    """Copy adapters to their slots, and wait for it."""
    done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    copied: list[bool] = []
    copier = AdapterCopier(store, done.put)
    for slot, adapter in adapters.items():
        copier.copy(slot, adapter, copied.append)
    for _ in adapters:
        done.get(timeout=60)()
    copier.close()
    assert copied == [True] * len(adapters)


def plan_adapter(layout: AdapterLayout, raw: Mapping[str, Any], tensors: dict[str, Tensor]) -> AdapterPlan:
    """Plan to load an adapter for a model, from the bytes of its files."""
    file = TensorFile(MemoryBytes(bytearray(save(tensors)), "adapter_model.safetensors"))
    return AdapterPlan(AdapterConfig.parse(json.dumps(raw).encode()), file, layout)


def load_directory(directory: Path, layout: AdapterLayout, base: BaseRows) -> Adapter:
    """Load an adapter from its directory, as a server does from its folder."""
    root = AdapterRoot(directory.parent)
    with root.open(directory.name) as (config, tensors):
        adapter = AdapterPlan(AdapterConfig.parse(config), TensorFile(tensors), layout).load(base, poisoned)
    root.close()
    return adapter


def poisoned(num_bytes: int) -> Tensor:
    """Host memory in which every float of any width is NaN."""
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def write_adapter(directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a directory as PEFT does."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    (directory / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    return directory
