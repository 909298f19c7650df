"""Small models over ranks beside one process: an engine's batches, their error and their bits, and states that go from
one to the other and back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_bench.ranks.driven import ADAPTERS, DRAFTED, STEPS, Driven
from deltaline_bench.ranks.figures import Figures
from deltaline_bench.ranks.models import MODELS
from deltaline_server.models.model import ModelOptions
from deltaline_server.ranks.group import Group

MAX_ERROR = 1e-4


def measure(group: Group, device: torch.device, name: str) -> int:
    """Compare one of MODELS; how many checks failed."""
    begin_s, figures = time.monotonic(), Figures(f"{name}:", group)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODELS[name]))
        options = ModelOptions(device, random_init=path, dtype=torch.float32, adapters=ADAPTERS)
        place = group.place
        shared = replace(options, rank=place.rank, world_size=place.world_size, ranks=group.ranks)
        alone = None if place.rank else Driven.open(options, None)
        together = Driven.open(shared, group.ranks)
    if alone is not None and together is not None:
        with alone, together:
            _compare(figures, alone, together)
            _carry(figures, alone, together)
    figures.tell("took", f"{time.monotonic() - begin_s:.0f} s")
    return figures.num_wrong


def _compare(figures: Figures, alone: Driven, together: Driven) -> None:
    once = together.play((1, 2), 2)
    error = _error(once, alone.play((1, 2), 2))
    figures.check("as one GPU computes", error < MAX_ERROR, f"relative error {error:.1e}")
    adapted = together.play((7, 8), 2, is_adapted=True)
    error = _error(adapted, alone.play((7, 8), 2, is_adapted=True))
    changed = _error([adapted[0][:70]], [once[0][:70]])
    note = f"relative error {error:.1e}; the adapter changes {changed:.1e}"
    figures.check("with an adapter too", error < MAX_ERROR and changed > MAX_ERROR, note)
    figures.check("a repeat has the same bits", _alike(together.play((3, 4), 2), once))
    beside = together.play((5, 6), 3)
    firsts = [[one[: step.lengths[0]] for one, step in zip(made, STEPS, strict=True)] for made in (beside, once)]
    figures.check("whatever a row's company", _alike(*firsts) and not _alike(beside, once))


def _carry(figures: Figures, alone: Driven, together: Driven) -> None:
    """States of one GPU, with drafts to be taken in, that the ranks go on from, and back."""
    lines, back = (9, 10), (3, 4)
    alone.play(lines, 2, STEPS[:DRAFTED])
    stored = [alone.save(line, row) for row, line in enumerate(lines)]
    for row, line in enumerate(lines):
        together.restore(line, row, stored[row])
    carried = [together.save(line, row) for row, line in enumerate(lines)]
    for row, line in enumerate(back):
        alone.restore(line, row, carried[row])
    returned = [alone.save(line, row) for row, line in enumerate(back)]
    num_bytes = sum(len(one) for one in stored)
    same = _alike(stored, carried) and _alike(stored, returned)
    figures.check("states of one GPU, of ranks and back: the same bytes", same, f"{num_bytes} bytes")
    expected, *made = (
        one.play(place, 2, STEPS[DRAFTED:]) for one, place in ((alone, lines), (together, lines), (alone, back))
    )
    error = _error(made[0], expected)
    note = f"relative error {error:.1e}"
    figures.check("which go on alike", error < MAX_ERROR and _alike(made[1], expected), note)


def _error(ours: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]]) -> float:
    return max(float(np.abs(our - one).max() / np.abs(one).max()) for our, one in zip(ours, expected, strict=True))


def _alike(some: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))
