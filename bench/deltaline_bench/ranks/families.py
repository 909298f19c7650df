"""Small models over ranks beside one process: an engine's batches, their error and their bits."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltaline_bench.ranks.figures import Figures
from deltaline_server.computing import make_executor
from deltaline_server.engine.engine import Engine
from deltaline_server.engine.rank_executor import LeadingExecutor, follow
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import ModelOptions, load_model
from deltaline_server.ranks.group import Group
from deltaline_server.ranks.ways import Ways
from deltaline_server.step import BatchResult, Limits, StepBatch

HIDDEN, WAIT_S, MAX_DRAFT, LINES, MAX_ERROR = 512, 120.0, 4, 8, 1e-4
_DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, dict[str, Any]] = {
    "delta rule, attention": _DELTA,
    "experts": _DELTA
    | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_heads": 16,
        "head_dim": 64,
        "state_size": 64,
        "conv_kernel": 4,
        "n_groups": 2,
    },
}
LIMITS = Limits(
    max_sequences=LINES,
    max_draft_tokens=MAX_DRAFT,
    max_lease_ms=1000,
    inline_limit_bytes=1 << 20,
    queue_rows=64,
    queue_bytes=1 << 24,
    chunk_tokens=256,
    short_rows=4,
    long_rows=2,
)


def measure(group: Group, device: torch.device) -> int:
    """Compare; how many checks failed."""
    figures = Figures("families", group)
    with TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            begin_s = time.monotonic()
            options = ModelOptions(device, random_init=path, dtype=torch.float32)
            shared = replace(options, rank=group.place.rank, world_size=group.place.world_size, ranks=group.ranks)
            if group.place.rank:
                _drive(shared, group)
                continue
            whole, made = _drive(options, None), _drive(shared, group)
            error = max(
                float(np.abs(ours - expected).max() / np.abs(expected).max())
                for ours, expected in zip(made["once"], whole["once"], strict=True)
            )
            figures.check(f"{name}: as one GPU computes", error < MAX_ERROR, f"relative error {error:.1e}")
            figures.check(f"{name}: a repeat has the same bits", _alike(made["once"], made["again"]))
            first = [one[: len(part)] for one, part in zip(made["beside"], made["first"], strict=True)]
            figures.check(f"{name}: whatever a row's company", _alike(first, made["first"]))
            figures.tell(f"{name}: took", f"{time.monotonic() - begin_s:.0f} s")
    return figures.num_wrong


def _alike(some: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


def _drive(options: ModelOptions, group: Group | None) -> dict[str, list[NDArray[Any]]]:
    """A prefill, a verify, a decode that commits two drafts: of two rows, the second drawn from a seed."""
    model = load_model(options)
    pool = model.make_pool(StateOptions(LINES, MAX_DRAFT))
    executor = make_executor(model, pool, LIMITS)
    if group is not None:
        ways = Ways.open(group.ranks)
        if group.place.rank:
            follow(executor, ways, _copy_nothing, lambda: None)
            return {}
        executor = LeadingExecutor(executor, ways)
    engine = Engine(executor, model.device)
    engine.start()
    engine.prepare(lambda done, total: None).result(WAIT_S)
    has_pages = pool.page_table is not None
    made = {
        "once": _play(engine, has_pages, (1, 2), 2),
        "again": _play(engine, has_pages, (3, 4), 2),
        "beside": _play(engine, has_pages, (5, 6), 3),
    }
    made["first"] = [one[:length] for one, length in zip(made["once"], (70, 4, 1), strict=True)]
    engine.close()
    return made


def _copy_nothing(told: object) -> None:
    raise RuntimeError("no state is copied")


def _play(engine: Engine, has_pages: bool, lines: tuple[int, int], seed: int) -> list[NDArray[Any]]:
    """Of rows on two lines: a prefill of 70 and 40 tokens, drafts of 4, a decode of both that takes two drafts in."""
    sources = [np.random.default_rng(1), np.random.default_rng(seed)]
    made = []
    # Lengths; whether they join; read lines; drafts taken in; half; positions; pages that begin.
    steps = (
        ((70, 40), True, (0, 0), 0, 0, (0, 0), ((0, 0), (0, 1), (1, 0))),
        ((4, 4), False, lines, 0, 0, (70, 40), ()),
        ((1, 1), True, lines, 2, 1, (72, 42), ()),
    )
    for lengths, joins, read, taken, half, positions, pages in steps:
        control = np.zeros((7, 3), dtype=np.int32)
        control[0, 1:] = np.cumsum(lengths)
        for row in range(2):
            control[1:, row] = (
                read[row],
                lines[row],
                lengths[row] if joins else 0,
                taken,
                half,
                positions[row] - taken,
            )
        hidden = tuple(
            source.standard_normal((n, HIDDEN)).astype(np.float32) for source, n in zip(sources, lengths, strict=True)
        )
        begun = np.array([[lines[row], at, 2 * lines[row] + at] for row, at in pages], dtype=np.int32).reshape(-1, 3)
        batch = StepBatch(
            0,
            control,
            0 if lengths[0] > MAX_DRAFT else 2,
            hidden,
            None,
            new_pages=np.ascontiguousarray(begun.T) if has_pages else None,
        )
        done: queue.SimpleQueue[BatchResult] = queue.SimpleQueue()
        engine.submit(batch, done.put)
        result = done.get(timeout=WAIT_S)
        if result.failed:
            raise RuntimeError("a batch failed")
        made.append(result.hidden)
    return made
