"""What every test shares: the devices, checkpoints written by transformers, and the skipping of tests marked `gpu`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without a CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only here: the tests of the client run where torch is not installed

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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

    All layers are Gated DeltaNet with a dense MLP unless `overrides` (of the language model's config) say otherwise.
    `model.get_decoder().layers` are its layers.
    """
    import torch  # only here, like transformers: most tests need neither
    import transformers

    config: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": hidden,
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
    if model_type == "qwen3_next":
        config |= {"num_experts": 0, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        made = transformers.Qwen3NextConfig(**config | overrides)
    elif model_type == "qwen3_5_text":
        made = transformers.Qwen3_5TextConfig(**config | overrides)
    else:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": hidden}
        made = transformers.Qwen3_5Config(text_config=config | overrides, vision_config=vision)
    classes = {
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
    }
    model: Any = getattr(transformers, classes[model_type])(made)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".A_log"):
                weight.uniform_(0.5, 8, generator=generator).log_()
            elif name.endswith(".dt_bias"):
                weight.uniform_(-4, 1, generator=generator)
            elif weight.ndim == 1:
                weight.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.3, generator=generator)
            else:
                weight.normal_(0, weight[0].numel() ** -0.5, generator=generator)
    model = model.to(getattr(torch, dtype)).eval()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
