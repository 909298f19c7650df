"""Hyper-connections against transformers' modules of DeepSeek-V4 with the same weights."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import mhc_head, mhc_head_reference, mhc_post, mhc_pre, mhc_pre_reference, prepare_gates

FP32 = torch.float32


def modules(streams: int, hidden: int) -> tuple[Any, Any]:
    """Make a hyper-connection and a head with random weights."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = SimpleNamespace(hc_mult=streams, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=hidden)
    made = modeling.DeepseekV4HyperConnection(config), modeling.DeepseekV4HyperHead(config)
    generator = torch.Generator().manual_seed(streams)
    for module in made:
        for parameter in module.parameters():
            size = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 1.0
            parameter.data = torch.randn(parameter.shape, generator=generator) * size
    return made


SIZES = itertools.product((1, 2, 3, 4, 8), (200, 1280, 4096, 7168))


@pytest.mark.parametrize(
    ("streams", "hidden"),
    [
        size if size in ((1, 200), (3, 200), (4, 1280)) else pytest.param(*size, marks=pytest.mark.sweep)
        for size in SIZES
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mhc_is_that_of_transformers(device: str, streams: int, hidden: int) -> None:
    connection, head = modules(streams, hidden)
    for num_tokens in (0, 1, 7, 64, 4096):
        # transformers' modules run on the CPU: of many tokens only what is few bytes, or usual.
        if num_tokens <= (4096 if hidden == 200 else 64 if hidden == 1280 or streams == 4 else 7):
            check(device, connection, head, num_tokens)


def check(device: str, connection: Any, head: Any, num_tokens: int) -> None:
    """Compare all operations for so many tokens."""
    streams = connection.hc_mult
    hidden = connection.fn.shape[1] // streams
    generator = torch.Generator().manual_seed(3)
    residual = torch.randn(1, num_tokens, streams, hidden, generator=generator)
    x = torch.randn(num_tokens, hidden, generator=generator)
    with torch.no_grad():
        post, comb, y = connection(residual)
        last = head(residual)
        # As the decoder layer does behind a sublayer.
        mixed = post.unsqueeze(-1) * x[None, :, None] + torch.matmul(comb.transpose(-1, -2), residual)
    own = residual[0].to(device)
    gates = prepare_gates(*(p.data.to(device) for p in (connection.fn, connection.scale, connection.base)))
    weights = [p.data.to(device) for p in (head.hc_fn, head.hc_scale, head.hc_base)]
    for run in (mhc_pre, mhc_pre_reference):
        for name, got, want in zip(("y", "post", "comb"), run(own, gates), (y, post, comb), strict=True):
            assert_close(name, got, want[0], FP32)
    for collapse in (mhc_head, mhc_head_reference):
        assert_close("head", collapse(own, *weights), last[0], FP32)
    got = mhc_post(x.to(device), own, post[0].to(device).contiguous(), comb[0].to(device).contiguous())
    assert_close("mixed", got, mixed[0], FP32)
