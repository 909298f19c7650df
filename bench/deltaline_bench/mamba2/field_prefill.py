"""The field's chunked Mamba2, called as its engine calls it. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from deltaline_bench.case import Side, SideMaker
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.peers import Peers

VLLM = "vllm.model_executor.layers.mamba.ops.ssd_combined"
SCAN = "mamba_chunk_scan_combined_varlen"
# Nemotron-H has chunks of 128, most other models of 256.
CHUNKS = (128, 256)

Function = Callable[..., Any]


def prefill_peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for a prefill."""

    def maker(chunk: int) -> SideMaker:
        return lambda: _vllm(batch, found.load(VLLM, SCAN), chunk)

    return {f"vLLM, chunks of {chunk}": maker(chunk) for chunk in CHUNKS}


def _vllm(batch: Batch, function: Function, chunk: int) -> Side:
    # The engine gathers the initial states before the call: that is not timed.
    x, B, C = batch.split()
    out = torch.empty(x.shape, dtype=x.dtype, device=batch.device)
    state = batch.new_state()
    starts = batch.starts()
    # Its chunks cross neither a row's end nor a multiple of their length.
    ends, rows, last = [0], [], []
    for row, (begin, end) in enumerate(pairwise(starts)):
        for stop in (*range((begin // chunk + 1) * chunk, end, chunk), end):
            if stop > begin:
                ends.append(stop)
                rows.append(row)
        last.append(len(rows) - 1)
    told = {
        "A": -batch.A_log.exp(),
        "B": B,
        "C": C,
        "chunk_size": chunk,
        "cu_seqlens": batch.int32(starts),
        "cu_chunk_seqlens": batch.int32(ends),
        "last_chunk_indices": batch.int32(last),
        "seq_idx": batch.int32(rows),
        "out": out,
        "D": batch.D,
        "dt_bias": batch.dt_bias,
        "initial_states": batch.states,
        "dt_softplus": True,
        "state_dtype": batch.shape.state,
        "final_states_out": state,
        "final_state_indices": batch.int32(batch.line_index),
    }

    def call() -> Any:
        function(x, batch.dt, **told)
        return out

    return Side(call, lambda y: {"y": y, "state": state[batch.line_index]}, lambda: batch.reset_state(state))
