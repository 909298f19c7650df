"""Layers of a model of 27 billion parameters over ranks beside one GPU: decode and prefill in graphs, and where decodes
over ranks spend their time."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from deltaline_bench.model.profile import trace, write_profile
from deltaline_bench.model.shapes import DENSE_27B
from deltaline_bench.ranks.figures import Figures
from deltaline_bench.ranks.graph import Captured, captured
from deltaline_kernels import Rows
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import ModelOptions, load_model
from deltaline_server.ranks.group import Group

LAYERS, CONTEXT, PAGE, LINES, PREFILL, ROUNDS = 64, 1024, 64, 64, 8192, 12
DECODES = (1, 64)
# Layers that have all kinds of kernels.
FEW_LAYERS = 4
# Of a layer with its share of the state; and beside them, for what is computed.
LAYER_BYTES, BESIDE_BYTES = 1_150_000_000, 8 << 30
# Of one GPU's time, and of as many GPUs' as there are.
MOST_DECODE, LEAST_PREFILL = 0.62, 0.82


def measure(group: Group, device: torch.device) -> int:
    """Measure; how many bars of two ranks were missed."""
    figures, world_size = Figures("stack", group), group.place.world_size
    fits = torch.tensor([(torch.cuda.mem_get_info(device)[0] - BESIDE_BYTES) // LAYER_BYTES], device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    layers = min(LAYERS, int(fits) // FEW_LAYERS * FEW_LAYERS)
    config = DENSE_27B | {"num_hidden_layers": layers, "max_position_embeddings": 2 * PREFILL}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        options = ModelOptions(device, random_init=path, dtype=torch.bfloat16)
        shared = replace(options, rank=group.place.rank, world_size=world_size)
        figures.tell("layers of 27B shape", str(layers))
        alone: dict[str, float] = {}
        if group.place.rank == 0:
            alone = _times(_Layers(options))
        else:  # meanwhile compiles what a rank launches
            _times(_Layers(replace(shared, layers=range(FEW_LAYERS))))
        torch.cuda.empty_cache()
        dist.barrier()
        together = _Layers(replace(shared, ranks=group.ranks))
    for name, took in _times(together).items():
        if name not in alone:  # rank 0 alone has measured one GPU
            continue
        share, efficiency = took / alone[name], alone[name] / took / world_size
        note = f"one GPU {alone[name] / 1e3:.2f} ms: {share:.3f} of it, efficiency {efficiency:.2f}"
        figures.tell(name, f"{took / 1e3:.2f} ms", note)
        if world_size == 2:
            is_met = efficiency >= LEAST_PREFILL if name.startswith("prefill") else share <= MOST_DECODE
            figures.check(f"{name}: its bar", is_met)
    for rows in DECODES:
        launches = trace(together.decode(rows).replay)
        if group.place.rank == 0:
            print(f"decode of {rows} rows, rank 0, by kernel:\n{write_profile(launches)}", flush=True)
    return figures.num_wrong


class _Layers:
    """Layers with their state, and graphs of their batches."""

    @torch.inference_mode()
    def __init__(self, options: ModelOptions) -> None:
        self._model = model = load_model(options)
        self._pool = model.make_pool(StateOptions(LINES, 4, page_size=PAGE))

    def decode(self, num_rows: int) -> Captured[Tensor]:
        """Of so many rows, each behind CONTEXT tokens."""
        control = torch.zeros(7, num_rows + 1, dtype=torch.int32)
        control[0] = torch.arange(num_rows + 1)
        control[1, :-1] = control[2, :-1] = torch.arange(1, num_rows + 1)
        control[3, :-1], control[6, :-1] = 1, CONTEXT
        pages = -(-CONTEXT // PAGE) + 1
        table = 1 + torch.arange(LINES * pages, dtype=torch.int32, device=self._model.device).view(LINES, pages)
        return self._capture(Rows(control.to(self._model.device), num_rows, 1, 1), num_rows, table)

    def prefill(self) -> Captured[Tensor]:
        """Of PREFILL tokens of one row."""
        control = torch.tensor([[0, PREFILL], [0, 0], [1, 0], [PREFILL, 0], [0, 0], [0, 0], [0, 0]], dtype=torch.int32)
        table = torch.arange(1, PREFILL // PAGE + 1, dtype=torch.int32, device=self._model.device)[None]
        return self._capture(Rows(control.to(self._model.device), 0, 4, PREFILL), PREFILL, table)

    @torch.inference_mode()
    def _capture(self, rows: Rows, tokens: int, table: Tensor) -> Captured[Tensor]:
        model, pool = self._model, self._pool
        pool.place_rows(torch.arange(1, len(table) + 1, device=model.device), table)
        source = torch.Generator(model.device).manual_seed(3)
        hidden = torch.randn(tokens, model.hidden_size, device=model.device, generator=source).to(model.dtype)
        return captured(lambda: model.forward(0, hidden, rows, pool))


def _times(layers: _Layers) -> dict[str, float]:
    """Microseconds of each batch."""
    found = {f"decode of {rows} rows at {CONTEXT}": _time(layers.decode(rows), calls=3) for rows in DECODES}
    return found | {f"prefill of {PREFILL} tokens": _time(layers.prefill(), calls=1)}


def _time(graph: Captured[Tensor], calls: int) -> float:
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
