"""Layers of a model of 27 billion parameters over ranks beside one GPU: decode and prefill in graphs."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from deltaline_bench.model.shapes import DENSE_27B
from deltaline_bench.ranks.figures import Figures
from deltaline_bench.ranks.graph import captured
from deltaline_kernels import Rows
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.models.model import Model, ModelOptions, load_model
from deltaline_server.ranks.group import Group

LAYERS, CONTEXT, PAGE, LINES, PREFILL, ROUNDS = 64, 1024, 64, 64, 8192, 12
# Of a layer with its share of the state; and beside them, for what is computed.
LAYER_BYTES, BESIDE_BYTES = 1_150_000_000, 8 << 30


def measure(group: Group, device: torch.device) -> int:
    """Measure; no check can fail."""
    figures = Figures("stack", group)
    fits = torch.tensor([(torch.cuda.mem_get_info(device)[0] - BESIDE_BYTES) // LAYER_BYTES], device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    layers = min(LAYERS, int(fits) // 4 * 4)
    config = DENSE_27B | {"num_hidden_layers": layers, "max_position_embeddings": 2 * PREFILL}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        options = ModelOptions(device, random_init=path, dtype=torch.bfloat16)
        shared = replace(options, rank=group.place.rank, world_size=group.place.world_size, ranks=group.ranks)
        figures.tell("layers of 27B shape", str(layers))
        alone: dict[str, float] = {}
        if group.place.rank == 0:
            alone = _times(options)
            torch.cuda.empty_cache()
        dist.barrier()
        together = _times(shared)
    for name, took in together.items():
        before = alone.get(name, took)
        figures.tell(
            name,
            f"{took / 1e3:.2f} ms",
            f"one GPU {before / 1e3:.2f} ms: {took / before:.3f} of it, "
            f"efficiency {before / took / group.place.world_size:.2f}",
        )
    return figures.num_wrong


@torch.inference_mode()
def _times(options: ModelOptions) -> dict[str, float]:
    model = load_model(options)
    pool = model.make_pool(StateOptions(LINES, 4, page_size=PAGE))
    assert pool.page_table is not None
    lines = torch.arange(1, LINES + 1, device=model.device)
    pages = -(-CONTEXT // PAGE) + 1
    table = 1 + torch.arange(LINES * pages, dtype=torch.int32, device=model.device).view(LINES, pages)
    pool.place_rows(lines, table)
    found = {f"decode of {rows} rows at {CONTEXT}": _decode(model, pool, rows) for rows in (1, 64)}
    many = torch.arange(1, PREFILL // PAGE + 1, dtype=torch.int32, device=model.device)[None]
    pool.place_rows(lines[:1], many)
    found[f"prefill of {PREFILL} tokens"] = _prefill(model, pool)
    return found


def _decode(model: Model, pool: StatePool, num_rows: int) -> float:
    control = torch.zeros(7, num_rows + 1, dtype=torch.int32)
    control[0] = torch.arange(num_rows + 1)
    control[1, :-1] = control[2, :-1] = torch.arange(1, num_rows + 1)
    control[3, :-1], control[6, :-1] = 1, CONTEXT
    rows = Rows(control.to(model.device), num_rows, 1, 1)
    return _time(model, pool, rows, num_rows, calls=3)


def _prefill(model: Model, pool: StatePool) -> float:
    control = torch.tensor([[0, PREFILL], [0, 0], [1, 0], [PREFILL, 0], [0, 0], [0, 0], [0, 0]], dtype=torch.int32)
    return _time(model, pool, Rows(control.to(model.device), 0, 4, PREFILL), PREFILL, calls=1)


def _time(model: Model, pool: StatePool, rows: Rows, tokens: int, calls: int) -> float:
    source = torch.Generator(model.device).manual_seed(3)
    hidden = torch.randn(tokens, model.hidden_size, device=model.device, generator=source).to(model.dtype)
    graph, _ = captured(lambda: model.forward(0, hidden, rows, pool))
    took: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(took)
