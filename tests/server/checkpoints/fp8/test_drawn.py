"""Weights that are drawn in FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import serve
from rigs.quantised import ALL, BLOCK
from rigs.ranked_layers import play
from rigs.small_models import EXPERTS

from deltaline_server.checkpoints.fp8.drawn import DrawnFp8
from deltaline_server.checkpoints.fp8.quantization import Quantization
from deltaline_server.checkpoints.random_tensors import RandomTensors
from deltaline_server.models.model import ModelOptions, load_model, open_plan

CPU = torch.device("cpu")
SHAPES = {
    "layers.0.a.weight": (200, 300),
    "layers.0.mlp.gate.weight": (200, 300),
    "layers.0.gate_proj.weight": (150, 30),
    "layers.0.conv1d.weight": (200, 1, 4),
    "layers.0.experts.down_proj": (3, 130, 40),
    "layers.0.norm.weight": (200,),
}
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
TOLD: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["in_proj_a", "in_proj_b", "mlp.gate", "mlp.shared_expert_gate"],
}


def drawn(block: tuple[int, int] | None) -> DrawnFp8:
    return DrawnFp8(RandomTensors(SHAPES, 3, CPU), Quantization(block, ("gate",)))


@pytest.mark.parametrize("block", [BLOCK, None])
def test_parts_are_those_of_the_whole_and_what_values_and_scales_stand_for(block: tuple[int, int] | None) -> None:
    source, plain = drawn(block), RandomTensors(SHAPES, 3, CPU)
    in_fp8 = [name for name in source.names if source.info(name).fp8 is not None]
    assert in_fp8 == ["layers.0.a.weight", "layers.0.gate_proj.weight", "layers.0.experts.down_proj"]
    for name, shape in SHAPES.items():
        whole, fp8 = source.read(name, ALL, ALL), source.info(name).fp8
        assert torch.equal(
            source.read(name, slice(1, 3), slice(0, 9)), whole[1:3, :9] if len(shape) > 1 else whole[1:3]
        )
        if fp8 is None:
            assert torch.equal(whole, plain.read(name, ALL, ALL))
            continue
        values, scales = fp8.read(ALL, ALL).view(torch.float8_e4m3fn).float(), fp8.read_scales()
        row, column = torch.arange(shape[-2]) // fp8.block[0], torch.arange(shape[-1]) // fp8.block[1]
        assert torch.equal(whole, values * scales[..., row[:, None], column])
        assert values.isfinite().all() and 100 < values.abs().max() <= 448
        assert torch.allclose(whole, plain.read(name, ALL, ALL), rtol=0.0625, atol=1e-3 * shape[-1] ** -0.5)


def write(folder: Path, told: dict[str, Any] | None) -> ModelOptions:
    path = folder / "config.json"
    path.write_text(json.dumps(EXPERTS | SIZES | ({} if told is None else {"quantization_config": told})))
    return ModelOptions(CPU, random_init=path)


def test_a_drawn_model_stays_in_fp8(tmp_path: Path) -> None:
    options = write(tmp_path, TOLD)
    with open_plan(options) as plan:
        assert all(plan.loader.experts_in_fp8(layer) for layer in plan.layers)
        # b and a, each by itself in what is stored, are plain.
        assert [piece.in_fp8 for piece in plan.loader.pieces(0)] == [True, False, True]
    first, second = (play(serve(options), (1, 2), (1, 2)) for _ in range(2))
    assert first.isfinite().all() and torch.equal(first, second)


def test_what_is_drawn_in_fp8_is_another_model(tmp_path: Path) -> None:
    """As are others in it; which modules are not is seen where weights differ alone."""
    fewer = TOLD | {"modules_to_not_convert": None}
    found = {load_model(write(tmp_path, told)).fingerprint(torch.float32, 1) for told in (None, TOLD, fewer)}
    assert len(found) == 3
