"""Batches of attention rows for the tests, and their truth: eager flex_attention of PyTorch in fp64, row by row.

The modifiers of the truth are written here again, as PyTorch's users write them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from rigs.kernels.paths import InterpretedPath, Path
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from deltaline_kernels import Rows
from deltaline_kernels.attention import Modifiers, and_masks, find_modifier, flex_decode, or_masks
from deltaline_kernels.attention.inputs import Keys, Queries
from deltaline_kernels.attention.modifiers.modifier import Mask, Part
from deltaline_kernels.attention.plan import AttentionHeads

MAX_POSITION = 2048


@dataclass(frozen=True)
class Row:
    """A row: its tokens, those before them, and whether it is skipped."""

    tokens: int
    position: int = 0
    skipped: bool = False


@dataclass(frozen=True)
class Layer:
    """The sizes of an attention; `page` is the keys of a page. is_latent: the values are the first of the keys."""

    HQ: int = 4
    HKV: int = 2
    D: int = 64
    DV: int = 64
    page: int = 16
    is_latent: bool = False


@dataclass(frozen=True)
class Truth:
    """Modifiers as PyTorch's users write them: score(score, line, h, q, kv), mask(line, h, q, kv)."""

    score: Callable[..., Tensor] | None = None
    mask: Callable[..., Tensor] | None = None


@dataclass
class Batch:
    """Inputs of `flex_decode`. Free pages, and what lies behind a row's keys, hold NaN."""

    layer: Layer
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    rows: Rows
    members: list[Row]
    lines: list[int]
    gate: Tensor
    sinks: Tensor
    keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, path: Path, modifiers: Modifiers | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return o and lse, by the path's way; options as of `flex_decode`."""
        value_dim = self.layer.DV if self.layer.is_latent else None
        values = None if self.layer.is_latent else self.v_pages
        if not isinstance(path, InterpretedPath):
            arguments = (self.q, self.k_pages, values, self.page_table, self.rows)
            o, lse = flex_decode(*arguments, modifiers=modifiers, return_lse=True, value_dim=value_dim, **options)
            return o, lse
        from deltaline_kernels.attention.launch import flex_decode_triton

        layer = self.layer
        o, lse = torch.empty(*self.q.shape[:2], layer.DV, dtype=self.q.dtype), torch.empty(self.q.shape[:2])
        keys = Keys(
            self.k_pages, values, self.page_table, layer.page, layer.page * self.page_table.shape[1], False, False
        )
        heads = AttentionHeads(
            layer.HQ, layer.HKV, layer.D, layer.DV, options.get("scale", layer.D**-0.5), layer.is_latent
        )
        sinks, gate = options.get("sinks"), options.get("gate")
        modifiers = Modifiers() if modifiers is None else modifiers
        queries = Queries(self.q, heads, modifiers, sinks, gate, options.get("blocks"))
        flex_decode_triton(queries, keys, self.rows, o, lse)
        return o, lse

    def expected(self, truth: Truth = Truth(), scale: float | None = None) -> tuple[Tensor, Tensor]:
        """Return o and lse in fp64 on the CPU, without sinks and gate; zero and -inf for rows that are skipped."""
        num_tokens, num_heads, _ = self.q.shape
        o = torch.zeros(num_tokens, num_heads, self.layer.DV, dtype=torch.float64)
        lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
        begin = 0
        for row, line in zip(self.members, self.lines, strict=True):
            end = begin + row.tokens
            if not row.skipped and row.tokens:
                q = self.q[begin:end].cpu().double().transpose(0, 1)[None]
                k, v = self.keys[line]
                o[begin:end], lse[begin:end] = _flex(q, k.double(), v.double(), line, row.position, truth, scale)
            begin = end
        return o, lse


def _flex(
    q: Tensor, k: Tensor, v: Tensor, line: int, position: int, truth: Truth, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return o `[n, HQ, DV]` and lse `[n, HQ]` of q `[1, HQ, n, D]`, k and v `[keys, HKV, *]`."""
    at = torch.tensor(line)
    score = block_mask = None
    if truth.score is not None:
        score = lambda s, b, h, i, kv: truth.score(s, at, h, i + position, kv)  # noqa: E731
    if truth.mask is not None:

        def mask(b: Tensor, h: Tensor, i: Tensor, kv: Tensor) -> Tensor:
            return truth.mask(at, h, i + position, kv)  # type: ignore[misc]

        block_mask = create_block_mask(mask, 1, q.shape[1], q.shape[2], k.shape[0], device="cpu")
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        # It is slow, and says so; slower still if every function is traced first.
        warnings.simplefilter("ignore")
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        o, aux = flex_attention(
            q,
            k,
            v,
            score_mod=score,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
    assert aux.lse is not None
    return o[0].transpose(0, 1), aux.lse[0].transpose(0, 1)


def finished(batch: Batch, o: Tensor, lse: Tensor, *, sinks: bool, gate: bool) -> tuple[Tensor, Tensor]:
    """Return what sinks and gate make of a truth: what a sink takes away is sigmoid(lse - sink)."""
    if sinks:
        sink = batch.sinks.cpu().double()
        o = o * (lse - sink).sigmoid()[..., None]
        live = torch.tensor([not row.skipped for row in batch.members for _ in range(row.tokens)])
        lse = torch.where(live[:, None], torch.logaddexp(lse, sink), lse)
    if gate:
        o = o * batch.gate.cpu().double().sigmoid()
    return o, lse


def make_batch(
    members: Sequence[Row],
    path: Path,
    layer: Layer = Layer(),
    *,
    max_short: int = 16,
    seed: int = 0,
    spare: int = 1,
) -> Batch:
    """Make random inputs; lines and pages are scattered, some belong to nobody.

    Args:
        spare: pages of a line behind those that its row needs.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(members)
    lines = (torch.randperm(num_rows + 1, generator=generator)[:num_rows] + 1).tolist()
    most = max((-(-(row.position + row.tokens) // layer.page) for row in members), default=1) + spare
    num_lines = num_rows + 2
    table = (torch.randperm(num_lines * most, generator=generator) + 1).view(num_lines, most).to(torch.int32)
    shape = (num_lines * most + 1, layer.page, layer.HKV)
    k_pages, v_pages = (torch.full((*shape, size), torch.nan, dtype=path.dtype) for size in (layer.D, layer.DV))
    keys = {}
    for row, line in zip(members, lines, strict=True):
        n = row.position + row.tokens
        k, v = (torch.randn(n, layer.HKV, size, generator=generator).to(path.dtype) for size in (layer.D, layer.DV))
        v = k[..., : layer.DV] if layer.is_latent else v
        if not row.skipped:
            j = torch.arange(n)
            pages = table[line, j // layer.page].long()
            k_pages[pages, j % layer.page], v_pages[pages, j % layer.page] = k, v
            keys[line] = (k, v)
    lengths = [row.tokens for row in members]
    write = [-1 if row.skipped else line for row, line in zip(members, lines, strict=True)]
    zeros = [0] * num_rows
    rows = Rows.build(
        lengths,
        write,
        write,
        lengths,
        zeros,
        zeros,
        max_short=max_short,
        device=path.device,
        position=[row.position for row in members],
    )
    # Slices of one projection: per head q | gate.
    both = torch.randn(sum(lengths), layer.HQ, layer.D + layer.DV, generator=generator).to(path.dtype).to(path.device)
    q, gate = both.split((layer.D, layer.DV), dim=-1)
    sinks = torch.randn(layer.HQ, generator=generator).to(path.device)
    k_pages, v_pages, table = (x.to(path.device) for x in (k_pages, v_pages, table))
    if layer.is_latent:
        v_pages = k_pages[..., : layer.DV]
    return Batch(layer, q, k_pages, v_pages, table, rows, list(members), lines, gate, sinks, keys)


def modifier_case(name: str, layer: Layer, num_lines: int, device: str = "cpu") -> tuple[Modifiers, Truth]:
    """Return modifiers by the name of a case, and the same as PyTorch's users write them."""
    scores, mask, truth = modifier_cases(layer, num_lines)[name]
    return Modifiers(scores, mask, device=device), truth


def modifier_cases(layer: Layer, num_lines: int) -> dict[str, tuple[list[Part], Part | Mask | None, Truth]]:
    generator = torch.Generator().manual_seed(1)
    find = find_modifier
    causal = find("causal")()
    window = 37
    slopes = torch.rand(layer.HQ, generator=generator) * 0.2
    prefix = torch.randint(0, 60, (num_lines,), generator=generator)
    documents = torch.randint(0, 3, (MAX_POSITION,), generator=generator)
    # Shorter than the keys: the last bias counts for the rest.
    bias = torch.randn(layer.HQ, 50, generator=generator)
    widths = torch.randint(1, 90, (layer.HQ,), generator=generator)
    caps = 1 + 3 * torch.rand(layer.HQ, generator=generator)
    own_documents = torch.randint(0, 3, (num_lines, 120), generator=generator)

    def is_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    def in_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv > q - window)

    def cap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return 2.5 * torch.tanh(s / 2.5)

    def slope(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s - (q - kv) * slopes[h]

    def capped(i: Tensor) -> Tensor:
        return torch.where(i > 119, 119, i)

    def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + bias[h, torch.where(kv > 49, 49, kv)]

    sliding = and_masks(causal, find("sliding_window")(window))
    return {
        "none": ([], None, Truth()),
        "causal": ([], causal, Truth(None, is_causal)),
        "sliding-window": ([], sliding, Truth(None, in_window)),
        "alibi": ([find("alibi")(slopes, per="head")], causal, Truth(slope, is_causal)),
        "soft-cap": ([find("soft_cap")(2.5)], None, Truth(cap)),
        "soft-cap-of-each-head": (
            [find("soft_cap")(caps, per="head")],
            causal,
            Truth(lambda s, b, h, q, kv: caps[h] * torch.tanh(s / caps[h]), is_causal),
        ),
        "soft-cap-in-a-window": ([find("soft_cap")(2.5)], sliding, Truth(cap, in_window)),
        "document": (
            [],
            and_masks(find("document")(documents), causal),
            Truth(None, lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv])),
        ),
        "document-of-each-sequence": (
            [],
            find("document")(own_documents, per="sequence"),
            Truth(None, lambda b, h, q, kv: own_documents[b, capped(q)] == own_documents[b, capped(kv)]),
        ),
        "prefix-lm": (
            [],
            find("prefix_lm")(prefix, per="sequence"),
            Truth(None, lambda b, h, q, kv: (q >= kv) | (kv < prefix[b])),
        ),
        "sinks-and-window": (
            [],
            or_masks(sliding, and_masks(causal, find("sink_tokens")(4))),
            Truth(None, lambda b, h, q, kv: (q >= kv) & ((kv < 4) | (kv > q - window))),
        ),
        "logit-bias": ([find("logit_bias")(bias, per="head")], causal, Truth(biased, is_causal)),
        "window-of-each-head": (
            [],
            and_masks(find("sliding_window")(widths, per="head"), causal),
            Truth(None, lambda b, h, q, kv: (q >= kv) & (kv > q - widths[h])),
        ),
        "scores-in-turn": (
            [find("alibi")(slopes, per="head"), find("soft_cap")(2.5), find("logit_bias")(bias, per="head")],
            causal,
            Truth(lambda s, b, h, q, kv: biased(cap(slope(s, b, h, q, kv), b, h, q, kv), b, h, q, kv), is_causal),
        ),
    }


MODIFIER_CASES = tuple(modifier_cases(Layer(), 2))
