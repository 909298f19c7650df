"""Several residual streams for a model of transformers: the hyper-connections of its deepseek_v4 around each branch.

No public checkpoint has Gated DeltaNet or Mamba2 between streams yet, and transformers has no such model. So this makes
one of its parts: the layers of a Qwen or a Mamba2 model, and deepseek_v4's modules. Used by make_checkpoint.py, which
writes the format that docs/operations.md describes, and by generate.py, which compares.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

MARKS = (".attn_hc.", ".ffn_hc.", ".hc_head.")
"""What stands in the names of the tensors that are added."""


def add_streams(model: Any, count: int, *, sinkhorn_iters: int = 20, eps: float = 1e-6) -> None:
    """Put streams in the place of the residual of a model for causal language modelling, with random gates.

    Mutates the model, and its config, which is then written with it.
    """
    config = model.config
    config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps = count, sinkhorn_iters, eps
    base = model.base_model
    for layer in base.layers:
        layer.attn_hc = _random(DeepseekV4HyperConnection(_read(config)))
        if hasattr(layer, "mlp"):
            layer.ffn_hc = _random(DeepseekV4HyperConnection(_read(config)))
        layer.forward = partial(_forward, layer)
    base.hc_head = _random(DeepseekV4HyperHead(_read(config)))
    base.layers[0].register_forward_pre_hook(partial(_expand, count))
    norm = base.norm if hasattr(base, "norm") else base.norm_f
    norm.register_forward_pre_hook(lambda _, inputs: (base.hc_head(inputs[0]),))


def load_streams(model: Any, directory: Path) -> None:
    """Give a model that transformers read from a directory the streams that it passed over, if there are any."""
    config = model.config
    count = getattr(config, "hc_mult", None)
    if count is None:
        return
    named = {"sinkhorn_iters": "hc_sinkhorn_iters", "eps": "hc_eps"}
    add_streams(model, count, **{name: getattr(config, key) for name, key in named.items() if hasattr(config, key)})
    held: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        held |= {name: tensor for name, tensor in load_file(path).items() if any(mark in name for mark in MARKS)}
    missing, unexpected = model.load_state_dict(held, strict=False)
    missing = [name for name in missing if any(mark in name for mark in MARKS)]
    if missing or unexpected:
        raise ValueError(f"{directory}: expected the tensors of {count} streams, got others: {missing or unexpected}")


def _read(config: Any) -> Any:
    """What deepseek_v4's modules read of a config, with its names."""
    eps = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_epsilon
    names = ("hc_mult", "hc_sinkhorn_iters", "hc_eps", "hidden_size")
    return SimpleNamespace(rms_norm_eps=eps, **{name: getattr(config, name) for name in names})


def _random(module: Any) -> Any:
    """Draw the gates' parameters: none of them is as good as absent, and no two streams are alike."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(1.0 if name.endswith("scale") else 0.0, 0.3 if name.endswith("scale") else 1.0)
    return module


def _expand(count: int, _: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Begin every stream with the embedding `[batch, tokens, hidden]`; streams are left as they are."""
    hidden, *rest = inputs
    return (hidden.unsqueeze(2).repeat(1, 1, count, 1) if hidden.ndim == 3 else hidden, *rest)


def _forward(layer: Any, streams: Tensor, **arguments: Any) -> Tensor:
    """Compute `[batch, tokens, streams, hidden]` from the same: deepseek_v4's layer around this one's branches."""
    if getattr(layer, "residual_in_fp32", False):
        streams = streams.float()
    post, comb, entering = layer.attn_hc(streams)
    streams = _join(_mix(layer, entering, arguments), streams, post, comb)
    if not hasattr(layer, "mlp"):
        return streams
    post, comb, entering = layer.ffn_hc(streams)
    return _join(layer.mlp(layer.post_attention_layernorm(entering)), streams, post, comb)


def _join(made: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Add what a branch made to each stream, and mix the streams."""
    mixed = torch.matmul(comb.to(streams.dtype).transpose(-1, -2), streams)
    return post.to(streams.dtype).unsqueeze(-1) * made.to(streams.dtype).unsqueeze(-2) + mixed


def _mix(layer: Any, entering: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What the layer's mixer makes of its input, normalised first. arguments: those of the layer."""
    if hasattr(layer, "mixer"):
        made: Tensor = layer.mixer(layer.norm(entering.to(layer.norm.weight.dtype)), **arguments)
        return made
    normed, cache = layer.input_layernorm(entering), arguments.get("past_key_values")
    if hasattr(layer, "linear_attn"):
        made = layer.linear_attn(normed, cache_params=cache, attention_mask=arguments.get("attention_mask"))
        return made
    made = layer.self_attn(normed, **arguments)[0]
    return made
