"""rotate_and_store against the attention of transformers' Qwen3-Next, which normalises, turns and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import Rows, rotate_and_store, rotate_and_store_reference

modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
HIDDEN, HQ, HKV, D, PAGE_SIZE = 48, 6, 2, 32, 16
OPERATIONS = {"reference": rotate_and_store_reference, "cpu": rotate_and_store}
LIMIT = 1e-6


def make_attention(partial: float) -> tuple[Any, Any]:
    """Return an attention layer with random weights, norms too, and its rotary embedding."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HQ,
        num_key_value_heads=HKV,
        head_dim=D,
        layer_types=["full_attention"],
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": partial},
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    attention = modeling.Qwen3NextAttention(config, 0)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data = 0.3 * torch.randn(D)
    return attention, modeling.Qwen3NextRotaryEmbedding(config)


def call_attention(
    attention: Any, embedding: Any, hidden: Tensor, position: int, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """Return the queries `[n, HQ, D]` that the layer hands to its attention; keys and values go to `cache`."""
    seen = []

    def look(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        seen.append(query[0].transpose(0, 1))
        return query.transpose(1, 2), None

    monkeypatch.setattr(modeling, "eager_attention_forward", look)
    cos_sin = embedding(hidden, torch.arange(position, position + hidden.shape[1])[None])
    with torch.no_grad():
        attention(hidden, cos_sin, None, past_key_values=cache)
    return seen[0]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
def test_a_prefill_and_a_decode_leave_what_transformers_leaves(
    operation: str, partial: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DynamicCache

    attention, embedding = make_attention(partial)
    hidden = torch.randn(1, 41, HIDDEN)
    cache = DynamicCache()
    k_pages, v_pages = torch.full((2, 6, PAGE_SIZE, HKV, D), torch.nan)
    page_table = torch.tensor([[0, 0, 0], [4, 1, 5]], dtype=torch.int32)
    angles = embedding(hidden, torch.arange(48)[None])
    rotary = torch.cat([part[0, :, : int(D * partial) // 2] for part in angles], dim=1)
    for begin, end in ((0, 37), (37, 38), (38, 41)):
        x = hidden[:, begin:end]
        want = call_attention(attention, embedding, x, begin, cache, monkeypatch)
        n = end - begin
        rows = Rows.build([n], [1], [1], [n], [0], [0], max_short=4, device="cpu", position=[begin])
        with torch.no_grad():
            q, k, v = (part(x[0]) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k, v = q.view(n, HQ, 2 * D)[..., :D], k.view(n, HKV, D), v.view(n, HKV, D)
        q_norm, k_norm = [1 + norm.weight.data for norm in (attention.q_norm, attention.k_norm)]
        eps = attention.q_norm.eps
        got = OPERATIONS[operation](q, k, v, q_norm, k_norm, eps, rotary, k_pages, v_pages, page_table, rows)
        assert float((got - want).abs().amax()) <= LIMIT
    kept = [pages[[4, 1, 5]].flatten(0, 1) for pages in (k_pages, v_pages)]
    cached = [tensor[0].transpose(0, 1) for tensor in (cache.layers[0].keys, cache.layers[0].values)]
    assert cached[0].shape == (41, HKV, D)
    assert float((kept[0][:41] - cached[0]).abs().amax()) <= LIMIT
    assert torch.equal(kept[1][:41], cached[1])
    assert kept[0][41:].isnan().all() and k_pages[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_is_nearer_to_fp32_than_those_of_transformers(dtype: torch.dtype) -> None:
    """transformers rounds the norm, the angles and each product: what differs from it is its own rounding."""
    attention, embedding = make_attention(0.5)
    n = 64
    q, k = torch.randn(n, HQ, D).to(dtype), torch.randn(n, HKV, D).to(dtype)
    angles = embedding(torch.zeros(1), torch.arange(n)[None])
    rotary = torch.cat([part[0, :, : D // 4] for part in angles], dim=1)
    rows = Rows.build([n], [1], [1], [n], [0], [0], max_short=4, device="cpu")
    page_table = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4]], dtype=torch.int32)
    q_norm, k_norm = [1 + norm.weight.data for norm in (attention.q_norm, attention.k_norm)]

    def own(compute: torch.dtype) -> Tensor:
        pages = torch.zeros(5, 16, HKV, D, dtype=compute)
        x, y, eps = q.to(compute), k.to(compute), attention.q_norm.eps
        return rotate_and_store(x, y, y, q_norm, k_norm, eps, rotary, pages, pages.clone(), page_table, rows)

    with torch.no_grad():
        heads = [norm(x[None]).transpose(1, 2) for norm, x in ((attention.q_norm, q), (attention.k_norm, k))]
        theirs, _ = modeling.apply_rotary_pos_emb(*heads, *(part.to(dtype) for part in angles))
    exact = own(torch.float32)
    error, other = (float((y.float() - exact).norm() / exact.norm()) for y in (own(dtype), theirs[0].transpose(0, 1)))
    assert 0 < error < other
    assert_close("q", own(dtype), theirs[0].transpose(0, 1), dtype)
