"""Weights in e4m3 with scales, drawn, and small checkpoints of them beside the same ones in fp32."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.weights import random_init

ALL = slice(None)
BLOCK = (128, 128)
# Modules of the layers that published FP8 checkpoints leave as they are.
LEFT = ("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "mlp.gate", "shared_expert_gate")


class Quantised(NamedTuple):
    """A weight as it is stored, its scales, and what both stand for."""

    stored: Tensor
    scales: Tensor
    meant: Tensor


def quantise(weight: Tensor, block: tuple[int, int] | None) -> Quantised:
    """Quantise matrices `[..., rows, columns]` by blocks, or each by itself: one alone has a scalar then."""
    rows, columns = weight.shape[-2:]
    size = block or (rows, columns)
    row, column = torch.arange(rows) // size[0], torch.arange(columns) // size[1]
    scales = torch.empty(*weight.shape[:-2], math.ceil(rows / size[0]), math.ceil(columns / size[1]))
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            part = weight[..., row == i, :][..., column == j]
            scales[..., i, j] = part.abs().amax(dim=(-2, -1)) / 448
    every = scales[..., row[:, None], column]
    stored = (weight / every).clamp(-448, 448).to(torch.float8_e4m3fn)
    if block is None:
        scales = scales.flatten(-3) if weight.ndim == 3 else scales.reshape(())
    return Quantised(stored, scales, stored.float() * every)


class Checkpoints(NamedTuple):
    """Folders of the same model: in e4m3, and what that stands for in fp32."""

    quantised: Path
    plain: Path


def write_checkpoints(
    folder: Path,
    config: dict[str, Any],
    block: tuple[int, int] | None,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Checkpoints:
    """Write both; change: of the drawn tensors, before they are quantised."""
    parsed = ModelConfig.from_mapping(config)
    drawn = random_init(parsed, range(len(parsed.layers)), Scope.BLOCK, seed=1)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in change({name: drawn.read(name, ALL, ALL) for name in drawn.names}).items():
        if tensor.ndim < 2 or name.removesuffix(".weight").endswith(LEFT):
            stored[name] = meant[name] = tensor
            continue
        made = quantise(tensor, block)
        stored[name], meant[name] = made.stored, made.meant
        stored[f"{name}_scale" if block is None else f"{name}_scale_inv"] = made.scales
        if block is None and name.endswith(".weight"):
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
    told: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if block is None else "dynamic"}
    told |= {} if block is None else {"weight_block_size": list(block), "modules_to_not_convert": list(LEFT)}
    return Checkpoints(
        write_model(folder / "quantised", config | {"quantization_config": told}, stored),
        write_model(folder / "plain", config, meant),
    )


def quantise_written(directory: Path, plain: Path) -> None:
    """Quantise the matrices of a checkpoint's layers whose sizes blocks divide, in place; what they stand for, and all
    else, is written to `plain`."""
    file, path = directory / "model.safetensors", directory / "config.json"
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(file).items():
        stored[name] = meant[name] = tensor
        if ".layers." in name and tensor.ndim == 2 and not any(size % 128 for size in tensor.shape):
            made = quantise(tensor, BLOCK)
            stored |= {name: made.stored, f"{name}_scale_inv": made.scales}
            meant[name] = made.meant
    config = json.loads(path.read_text())
    write_model(plain, config, meant)
    save_file(stored, file, metadata={"format": "pt"})
    told = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    path.write_text(json.dumps(config | {"quantization_config": told}))


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a model's directory."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with experts one by one in place of stacks, as Qwen's checkpoints have them."""
    single = dict(tensors)
    for name in tensors:
        stem, _, part = name.rpartition(".")
        if part not in ("gate_up_proj", "down_proj"):
            continue
        for i, expert in enumerate(single.pop(name)):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            single |= {f"{stem}.{i}.{one}.weight": w for one, w in zip(parts, expert.chunk(len(parts)), strict=True)}
    return single
