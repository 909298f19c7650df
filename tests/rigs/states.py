"""Small states of every family for tests of the tiers: layouts, progress, contents drawn from a seed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.shapes import (
    AttentionShape,
    GatedDeltaNetShape,
    KdaShape,
    Mamba1Shape,
    Mamba2Shape,
    ShortConvShape,
)
from deltaline_server.snapshots.header import StateHeader
from deltaline_server.snapshots.layout import Bytes, SpanProgress, StateLayer, StateLayout, state_bytes

GATED_DELTA = GatedDeltaNetShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4)
KDA = KdaShape(num_key_heads=4, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4)
_SCAN: dict[str, Any] = {"step_rank": 3, "norm_eps": 0.0, "has_norm_weights": False}
SCAN = Mamba1Shape.of(32, 5, 4, has_conv_bias=True, has_bias=False, **_SCAN)
MAMBA = Mamba2Shape(2, 4, 8, 6, 3, 2, (0.0, math.inf), has_conv_bias=True, has_bias=False)
SHORT_CONV = ShortConvShape.of(32, 3, has_bias=True)
ATTENTION = AttentionShape(6, 2, 16, 4, 1e4, max_positions=500)
LATENTS = LatentShape(6, 20, 4, 16, 12, query_rank=0, max_positions=500)
MAX_DRAFT = 4
LAYOUT = StateLayout(
    (StateLayer(0, 0, GATED_DELTA), StateLayer(1, 0, ATTENTION), StateLayer(3, 1, MAMBA), StateLayer(4, 1, ATTENTION)),
    num_spans=2,
    itemsize=2,
    state_itemsize=4,
    max_draft=MAX_DRAFT,
    max_tokens=500,
)
# As a snapshot has them, after a verify that was committed on the first span; the second had none.
SNAPSHOT = (SpanProgress(step=3, position=70, replay=2, draft_half=1, records_1=2), SpanProgress(step=5, position=70))
# As one that moves has them: a verify waits, another half was kept, commits are fixed, and a reply is there.
MOVED = (
    SpanProgress(9, 64, 3, 0, 1, 8, 0, 0, records_0=3, records_1=1, num_commits=2, reply_bytes=77),
    SpanProgress(9, 67, 0, 4, 0, 8, 4, 1, records_1=4, num_commits=1),
)
FINGERPRINT = bytes(range(32))


def make_header(seed: int = 0, spans: tuple[SpanProgress, ...] = SNAPSHOT, **changes: Any) -> StateHeader:
    """A header whose id follows from the seed."""
    id = np.random.default_rng(seed).bytes(16)
    header = StateHeader(id, FINGERPRINT, "alice", spans, "ö-lora", bytes(range(1, 33)), 1_700_000_000, key=b"k" * 20)
    return replace(header, **changes)


def make_memory(layout: StateLayout = LAYOUT, spans: tuple[SpanProgress, ...] = SNAPSHOT, seed: int = 0) -> Bytes:
    """A state's memory with random sections, and zeros between them."""
    sections = layout.sections(spans)
    memory = np.zeros(state_bytes(sections), dtype=np.uint8)
    rng = np.random.default_rng(seed)
    for section in sections:
        memory[section.offset : section.offset + section.num_bytes] = rng.integers(0, 256, section.num_bytes)
    return memory


def random_words(rng: np.random.Generator, shape: tuple[int, ...], itemsize: int) -> NDArray[Any]:
    """An array of unsigned integers of any bits."""
    words = np.frombuffer(rng.bytes(math.prod(shape) * itemsize), dtype=f"<u{itemsize}")
    return words.reshape(shape).copy()
