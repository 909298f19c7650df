"""PEFT as oracle: an adapter that it wrote does to the served layers what PEFT does when it merges it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.adapter_cases import merge_into
from rigs.layer_weights import block_weights, mixer_weights

from deltaline_server.adapters.files import AdapterPlan
from deltaline_server.adapters.peft_config import AdapterConfig
from deltaline_server.adapters.root import AdapterRoot
from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.modules import Packed, Placement
from deltaline_server.checkpoints.tensor_file import TensorFile
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.weights import LayerLoader

PLACEMENT = Placement(torch.device("cpu"), torch.float32)
MIXER_TYPES = ["linear_attention", "linear_attention", "full_attention"]
CASES: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear", "lora_alpha": 4},
    "a list": {"target_modules": ["in_proj_ba", "in_proj_a", "out_proj", "down_proj", "q_proj"], "use_rslora": True},
    "a pattern": {"target_modules": r".*\.(linear_attn\.(in|out)_proj.*|mlp\..*_proj)", "lora_alpha": 16},
    "patterns for ranks": {
        "target_modules": "all-linear",
        # Sorted by key, as PEFT writes them: of those that match, the first counts.
        "rank_pattern": {r"model\.(language_model\.)?layers\.1\..*": 7, "out_proj": 2, "up_proj": 1},
        "alpha_pattern": {r".*in_proj.*": 11, "mlp.up_proj": 3},
        "use_rslora": True,
    },
    "one layer": {"target_modules": ["out_proj", "down_proj"], "layers_to_transform": [1]},
    "exclusion": {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*|.*up_proj"},
    "DoRA": {"target_modules": "all-linear", "use_dora": True, "lora_alpha": 3, "rank_pattern": {"up_proj": 2}},
}


# It looks for experts in every qwen3_next.
@pytest.mark.filterwarnings("ignore:target_parameters=.*no parameter was matched:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_does_what_peft_does(
    tmp_path: Path, write_checkpoint: Callable[..., Any], case: str, model_type: str
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: it writes and merges the adapters")
    sizes: dict[str, Any] = {"hidden": 48, "intermediate": 40, "layers": 3, "value_heads": 6, "head_dim": 8}
    model = write_checkpoint(tmp_path / "base", model_type, **sizes, layer_types=MIXER_TYPES)
    options = dict(CASES[case])
    made = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, made)
    for name, parameter in wrapped.named_parameters():
        if "lora_magnitude" in name:
            parameter.data.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    wrapped.save_pretrained(tmp_path / "root" / "tuned")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")

    config = ModelConfig.from_directory(tmp_path / "base")
    root = AdapterRoot(tmp_path / "root")
    with (
        Checkpoint(tmp_path / "base") as base,
        Checkpoint(tmp_path / "merged") as merged,
        root.open("tuned") as (text, tensors),
    ):
        layout = AdapterLayout(config, Scope.BLOCK, (0, 1), PLACEMENT)
        before = LayerLoader(base, config, (0, 1), Scope.BLOCK, PLACEMENT)
        after = LayerLoader(merged, config, (0, 1), Scope.BLOCK, PLACEMENT)
        plan = AdapterPlan(AdapterConfig.parse(text), TensorFile(tensors), layout)
        adapter = plan.load(before, lambda size: torch.full((size,), 0xFF, dtype=torch.uint8))
        for layer in (0, 1):
            ours, theirs = projections(before, config, layer), projections(after, config, layer)
            for one in adapter.weights:
                if one.layer == layer:
                    merge_into(ours[one.packed], one)
            for packed in Packed:
                torch.testing.assert_close(ours[packed], theirs[packed], rtol=1e-5, atol=1e-5)
    root.close()
    assert plan.needs_base == (case == "DoRA")


def projections(loader: LayerLoader, config: ModelConfig, layer: int) -> dict[Packed, torch.Tensor]:
    mixer, block = mixer_weights(loader, layer), block_weights(loader, layer)
    return {
        Packed.IN_PROJ: mixer.in_proj,
        Packed.OUT_PROJ: mixer.out_proj,
        Packed.GATE_UP: block.gate_up,
        Packed.DOWN: block.down,
    }
