"""Weights that make mistakes show, drawn for a model of transformers."""

from __future__ import annotations

from typing import Any

import torch


def draw_weights(model: Any, model_type: str, seed: int) -> None:
    """Draw all weights of a model, and the biases of its routers, from a seed."""
    # The vectors that multiply as they are; other norms have the distance from 1.
    is_qwen = model_type.startswith("qwen")
    around_one = ("linear_attn.norm.weight",) if is_qwen else ("norm.weight", "norm_f.weight", ".D")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".A_log"):
                weight.uniform_(0.5, 8, generator=generator).log_()
            elif name.endswith((".dt_bias", ".dt_proj.bias")):
                weight.uniform_(-4, 1, generator=generator)
            elif weight.ndim == 1:
                weight.normal_(1.0 if name.endswith(around_one) else 0.0, 0.3, generator=generator)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith((".e_score_correction_bias", ".expert_bias")):
                buffer.normal_(0, 0.3, generator=generator)
