"""A server over ranks of a model that one GPU can't hold: random steps, and decodes beside the time that their bytes
take."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from deltaline_bench.model.shapes import EXPERTS_80B
from deltaline_bench.model.work import Work
from deltaline_bench.ranks.figures import Figures
from deltaline_bench.ranks.models import MODELS
from deltaline_bench.ranks.servers import ServerProcess
from deltaline_bench.service.random_steps import KINDS, Walk
from deltaline_client import AsyncClient, Row
from deltaline_server.models.config import ModelConfig

ROWS, CONTEXT, TOKENS, STEPS, ROUNDS, WARM_UP = (1, 64), 64, 512, 200, 40, 5
OPTIONS = ("--max-sequences", "64", "--batch-rows", "64", "--chunk-tokens", "1024", "--max-context", "1024")


def measure(world_size: int) -> int:
    """Serve and measure; how many checks failed. Without GPUs a small model, whose times mean nothing."""
    figures, has_gpu = Figures("large"), torch.cuda.is_available()
    model, dtype = (EXPERTS_80B, "bfloat16") if has_gpu else (MODELS["interleaved delta rule"], "float32")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model))
        work = Work(ModelConfig.from_file(path), getattr(torch, dtype).itemsize)
        copied = _copied_bytes_per_s() if has_gpu else None
        with ServerProcess(path, world_size, "--dtype", dtype, *OPTIONS) as server:
            server.wait_until_ready()
            weights = work.weight_bytes(1 << 30) / 1e9
            figures.tell(f"ready, {weights:.0f} GB of weights", f"{server.ready_s:.0f} s")
            asyncio.run(_use(figures, server.address, work, copied, world_size))
    return figures.num_wrong


async def _use(figures: Figures, address: str, work: Work, copied: float | None, world_size: int) -> None:
    async with AsyncClient(address) as client:
        info = await client.info()
        for rows in ROWS:
            took_ms, is_finite = await _decode(client, rows, work.config.hidden_size)
            note = ""
            if copied is not None:
                bytes_ms = work.decode_bytes(rows, CONTEXT) / world_size / copied * 1e3
                note = f"their bytes {bytes_ms:.2f} ms of a copy's {copied / 1e12:.2f} TB/s: {bytes_ms / took_ms:.2f}"
            figures.tell(f"decode of {rows} rows at {CONTEXT}", f"{took_ms:.2f} ms", note)
            figures.check(f"of {rows} rows: finite", is_finite)
        walked = await Walk(client, info, 16, TOKENS, seed=0).run(STEPS)
        kinds = ", ".join(f"{walked.rows[kind]} {kind}" for kind in KINDS)
        middle_ms = statistics.median(walked.seconds) * 1e3
        figures.tell(f"random steps answered, finite, of rows of {kinds}", str(STEPS), f"median {middle_ms:.1f} ms")


async def _decode(client: AsyncClient, num_rows: int, width: int) -> tuple[float, bool]:
    """The median milliseconds of a decode's computation, as the server tells it, and whether outputs are finite."""
    source, took = np.random.default_rng(num_rows), []
    sequences = await client.open_many(num_rows)
    prompts = source.standard_normal((num_rows, CONTEXT - WARM_UP - ROUNDS, width), dtype=np.float32)
    is_finite = all(np.isfinite(one).all() for one in await client.prefill(sequences, list(prompts)))
    for _ in range(WARM_UP + ROUNDS):
        tokens = source.standard_normal((num_rows, 1, width), dtype=np.float32)
        answer = await client.step([Row.decode(*one) for one in zip(sequences, tokens, strict=True)])
        took.append(answer.timing.compute_s * 1e3)
        is_finite &= all(np.isfinite(one).all() for one in answer.outputs)
    await client.close(sequences)
    return statistics.median(took[WARM_UP:]), is_finite


def _copied_bytes_per_s() -> float:
    from deltaline_bench.ceilings import measure_ceilings  # these need triton
    from deltaline_bench.cuda_timer import CudaTimer

    copied = measure_ceilings(CudaTimer(), torch.device("cuda"), ROUNDS).copy_bytes_per_s
    torch.cuda.empty_cache()
    return copied
