"""What is computed before graphs are captured: few layers, once for all sets of buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.limits import make_limits

from deltaline_server.engine.graphs import Graphs, make_buckets

SETS, SPANS = 3, 2


class Whole:
    """A model that tells what it is asked to compute."""

    spans, paged_spans = (range(4), range(4, 6)), frozenset[int]()
    name = "whole"

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def abridged(self, pool: object) -> Whole:
        made = Whole(self.told)
        made.name = "few layers"
        return made

    def forward(self, span: int, hidden: Any, rows: Any, *rest: Any) -> torch.Tensor:
        self.told.append((self.name, span, rows.num_short, rows.max_length, rest[1] is not None))
        return torch.zeros(rows.control.shape[1], 2)


class Buffers:
    """A set of buffers that holds nothing."""

    def skip_rows(self, layout: Any) -> None: ...

    def carries(self, layout: Any, span: int) -> bool:
        return False

    def inputs(self, layout: Any, span: int) -> Any:
        self.size = layout.rows + 1
        places = torch.zeros(1) if layout.has_adapters else None
        return torch.zeros(7, self.size, dtype=torch.int32), None, places, None, None

    def outputs(self, layout: Any, span: int) -> Any:
        return torch.zeros(self.size), torch.zeros(self.size, 2)


def test_few_layers_are_computed_before_the_first_capture_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told, captures, done = list[Any](), list[Any](), list[tuple[int, int]]()

    @contextmanager
    def capture(graph: Any, *_: Any, **__: Any) -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")
        captures.append(graph)

    for name, value in {
        "current_stream": lambda: SimpleNamespace(synchronize=lambda: None),
        "graph_pool_handle": object,
        "CUDAGraph": object,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    buckets = make_buckets(make_limits(short_rows=3, long_rows=2, chunk_tokens=100), 4, has_adapters=True)
    model: Any = Whole(told)
    sets: Any = [Buffers() for _ in range(SETS)]
    Graphs(model, Any, buckets).capture(sets, lambda *one: done.append(one))  # type: ignore[arg-type]
    wanted = list[Any]()
    for bucket in reversed(buckets):
        layout = bucket.layout
        for number in range(SETS):
            for span in range(SPANS):
                batch = (span, layout.short_rows, bucket.longest, layout.has_adapters)
                few = [("few layers", *batch)] if number == 0 else []
                wanted += [*few, "begin", ("whole", *batch), "end"]
    assert told == wanted
    total = SETS * SPANS * len(buckets)
    assert done == [(i + 1, total) for i in range(total)] and len(set(map(id, captures))) == total
