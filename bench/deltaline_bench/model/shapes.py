"""The models that are judged by name, as their config.json says them, and what they must reach on an H200."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Qwen3.5 of 27 billion parameters; layers that no key names are Gated DeltaNet, but for every fourth.
DENSE_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
}
# Qwen3.5-35B-A3B.
EXPERTS_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
}
# Qwen3-Next-80B-A3B, which takes the memory of two GPUs.
EXPERTS_80B: dict[str, Any] = EXPERTS_35B | {
    "model_type": "qwen3_next",
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}

# As their publishers quantise them.
FP8: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["in_proj_a", "in_proj_b", "mlp.gate", "mlp.shared_expert_gate"],
    }
}


@dataclass(frozen=True)
class Bars:
    """What a model must reach, and where it is meant to end: of its decodes by their rows, and of its prefill.

    decode_ms: computation. bytes_share: the bytes' time / computation. prefill_share: the products' own time /
    computation. ready_s: until a server with random weights is ready; checkpoint_s: with those of files.
    """

    decode_ms: Mapping[int, float] = field(default_factory=dict)
    decode_aim_ms: Mapping[int, float] = field(default_factory=dict)
    bytes_share: Mapping[int, float] = field(default_factory=dict)
    prefill_share: float | None = None
    prefill_aim: float | None = None
    ready_s: float | None = None
    checkpoint_s: float | None = None


NAMED: Mapping[str, tuple[dict[str, Any], Bars]] = {
    "27b": (
        DENSE_27B,
        Bars(
            decode_ms={1: 13.6, 16: 15.0, 64: 19.2},
            decode_aim_ms={1: 12.6, 16: 13.8, 64: 17.4},
            prefill_share=0.80,
            prefill_aim=0.88,
            ready_s=60.0,
            checkpoint_s=75.0,
        ),
    ),
    "35b-a3b": (EXPERTS_35B, Bars(bytes_share={1: 0.45, 16: 0.60, 64: 0.70})),
    "27b-fp8": (DENSE_27B | FP8, Bars(decode_ms={1: 8.6})),
    "35b-a3b-fp8": (EXPERTS_35B | FP8, Bars()),
}


@dataclass(frozen=True)
class Shape:
    """What is measured: a model directory, or a config.json whose weights are drawn. num_layers: the first ones, that
    are measured; None for all."""

    name: str
    path: Path
    bars: Bars = field(default_factory=Bars)
    num_layers: int | None = None

    @classmethod
    def find(cls, given: str, folder: Path, num_layers: int | None = None) -> Shape:
        """The shape of a name, a config.json or a model directory, or of its first layers, which have no bars.

        folder: where a named one's config is written.
        """
        if given in NAMED:
            config, bars = NAMED[given]
            path = folder / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            shape = cls(given, path, bars)
        else:
            path = Path(given)
            is_named_so = path.name == "config.json" and path.parent.name
            shape = cls(path.parent.name if is_named_so else path.name if path.is_dir() else path.stem, path)
        if num_layers is None:
            return shape
        return replace(shape, name=f"{shape.name}-{num_layers}-layers", bars=Bars(), num_layers=num_layers)

    @property
    def is_checkpoint(self) -> bool:
        """Whether its weights are read from files."""
        return self.path.is_dir()

    @property
    def config_path(self) -> Path:
        """Its config.json."""
        return self.path / "config.json" if self.is_checkpoint else self.path
