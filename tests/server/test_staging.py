"""What a slot's inbound memory holds after a copy, with the host's memory in place of pinned and of the device's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from deltaline_server.slot_layout import Layout
from deltaline_server.staging import Copier, Slot
from deltaline_server.step import StepBatch

HIDDEN, TOKENS = 8, 150
DTYPE = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = [Layout(4, 6, TOKENS, has_adapters, page_size) for has_adapters in (False, True) for page_size in (0, 16)]


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slot]:
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, **_: empty(*size, dtype=dtype))
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, **_: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    copier = Copier()
    yield Slot(LAYOUTS, HIDDEN, torch.bfloat16, DTYPE, copier)
    copier.close()


def make_batch(rng: np.random.Generator, layout: Layout) -> StepBatch:
    """Three short rows and a long one, with what the layout has room for."""
    control = np.zeros((7, 5), dtype=np.int32)
    control[0, 1:] = np.cumsum([1, 3, 2, 100])
    control[1:, :-1] = rng.integers(0, 50, (6, 4))
    hidden = rng.standard_normal((106, HIDDEN)).astype(DTYPE)
    slots = np.array([1, -1, 0, 2], dtype=np.int32) if layout.has_adapters else None
    pages = rng.integers(1, 99, (3, 7)).astype(np.int32) if layout.page_size else None
    return StepBatch(0, control, 3, (hidden[:50], hidden[50:]), None, adapter_slots=slots, new_pages=pages)


def test_a_batch_comes_as_its_layout_says(slot: Slot) -> None:
    rng, stream = np.random.default_rng(0), Any
    for layout in LAYOUTS * 2:  # each also over what others left
        batch = make_batch(rng, layout)
        slot.copy_in(batch, layout, stream)  # type: ignore[arg-type]
        control, hidden, adapter_slots, new_pages = slot.inputs(layout)
        assert control[:, :3].tolist() == batch.control[:, :3].tolist()
        assert control[1:, 4].tolist() == batch.control[1:, 3].tolist()
        assert control[1:3, [3, 5]].tolist() == [[-1, -1], [-1, -1]], "rows that the batch has not are skipped"
        assert hidden[:106].view(torch.int16).tolist() == np.concatenate(batch.hidden).view(np.int16).tolist()
        assert (adapter_slots is None) == (not layout.has_adapters) and (new_pages is None) == (not layout.page_size)
        if adapter_slots is not None:
            assert adapter_slots.tolist() == [1, -1, 0, -1, 2, -1]
        if new_pages is not None and batch.new_pages is not None:
            assert new_pages.shape == (3, layout.num_pages) == (3, 15)
            assert new_pages[:, :7].tolist() == batch.new_pages.tolist() and not new_pages[:, 7:].any()


def test_a_span_without_pages_leaves_their_region_alone(slot: Slot) -> None:
    layout, rng = LAYOUTS[1], np.random.default_rng(1)
    batch = make_batch(rng, layout)
    batch.new_pages = None
    slot.copy_in(batch, layout, Any)  # type: ignore[arg-type]
    assert slot.inputs(layout).control[:, :3].tolist() == batch.control[:, :3].tolist()
