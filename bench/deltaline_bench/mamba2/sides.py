"""Our side of a case of the Mamba2 recurrence, and the field's, each called as its own engine calls it.

Knows no figures and no bars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import Side, SideMaker
from deltaline_bench.lines import Mode
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.peers import Function, Peers
from deltaline_bench.recurrence.sides import Pool, TokenPool, on_lines
from deltaline_kernels import Rows, mamba2
from deltaline_kernels.compat import mamba_chunk_scan_combined_varlen, selective_state_update

VLLM = "vllm.model_executor.layers.mamba.ops"
SGLANG = "sglang.kernels.ops.mamba.triton_ops"
UPDATE, SCAN = "selective_state_update", "mamba_chunk_scan_combined_varlen"
# Tokens per chunk of vLLM's prefill: Nemotron-H has 128, most other models 256.
CHUNKS = (128, 256)


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signatures over it, which say nothing of a verify."""

    def recurrence(state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        xBC, dt = batch.packed
        groups = batch.shape.num_key_heads
        return mamba2(xBC, dt, batch.A_log, batch.D, batch.dt_bias, state, drafts, rows, num_groups=groups)

    sides: dict[str, SideMaker] = {"deltaline": lambda: on_lines(batch, recurrence)}
    if batch.shape.mode is Mode.PREFILL:
        sides["deltaline compat"] = lambda: _vllm_prefill(batch, mamba_chunk_scan_combined_varlen, CHUNKS[0])
    elif batch.shape.mode is Mode.DECODE:
        sides["deltaline compat"] = lambda: _decode(batch, selective_state_update)
    return sides


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    if batch.shape.mode is Mode.PREFILL:

        def scan(chunk: int) -> SideMaker:
            return lambda: _vllm_prefill(batch, found.load(f"{VLLM}.ssd_combined", SCAN), chunk)

        return {f"vLLM, chunks of {chunk}": scan(chunk) for chunk in CHUNKS}
    if batch.shape.mode is Mode.VERIFY:
        return {"vLLM": lambda: _vllm_verify(batch, found.load(f"{VLLM}.mamba_ssm", UPDATE))}
    return {
        "vLLM": lambda: _decode(batch, found.load(f"{VLLM}.mamba_ssm", UPDATE)),
        "SGLang": lambda: _decode(batch, found.load(f"{SGLANG}.mamba_ssm", UPDATE)),
    }


def _into(out: Tensor, function: Callable[[], object]) -> Callable[[], Tensor]:
    """Return a call of a function that writes `out`, which the call returns."""

    def call() -> Tensor:
        function()
        return out

    return call


def _update(batch: Batch, function: Function, pool: Pool | TokenPool, **told: Any) -> Side:
    """Make a side of the update, which has the same keywords in both engines; the heads' values are expanded views."""
    shape = batch.shape
    xBC, dt = batch.packed
    x, B, C = shape.split(xBC)
    size = (shape.num_value_heads, shape.value_dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=batch.device)
    call = partial(
        function,
        pool.state,
        x=x,
        dt=dt[..., None].expand(-1, -1, shape.value_dim),
        A=(-batch.A_log.exp())[:, None, None].expand(*size, shape.key_dim),
        B=B,
        C=C,
        D=batch.D[:, None].expand(*size),
        z=None,
        dt_bias=batch.dt_bias[:, None].expand(*size),
        dt_softplus=True,
        out=out,
        state_batch_indices=pool.index,
        **told,
    )
    return pool.side(_into(out, call), lambda y: y)


def _decode(batch: Batch, function: Function) -> Side:
    return _update(batch, function, Pool(batch))


def _vllm_verify(batch: Batch, function: Function) -> Side:
    pool = TokenPool(batch)
    told = {"num_accepted_tokens": pool.accepted, "cu_seqlens": pool.starts}
    return _update(batch, function, pool, dst_state_batch_indices=pool.index, **told)


def cut_chunks(starts: Sequence[int], chunk: int) -> tuple[list[int], list[int], list[int]]:
    """Cut rows of packed tokens into chunks as vLLM does: at each row's end and at multiples of `chunk`.

    Returns:
        where chunks begin, and the last one ends; the row of each chunk; the last chunk of each row.
    """
    borders, rows, last = [starts[0]], [], []
    for row, (begin, end) in enumerate(pairwise(starts)):
        for stop in (*range((begin // chunk + 1) * chunk, end, chunk), end):
            borders.append(stop)
            rows.append(row)
        last.append(len(rows) - 1)
    return borders, rows, last


def _vllm_prefill(batch: Batch, function: Function, chunk: int) -> Side:
    # The engine gathers the initial states before the call: that is not timed.
    pool = Pool(batch)
    xBC, dt = batch.packed
    x, B, C = batch.shape.split(xBC)
    out = torch.empty(x.shape, dtype=x.dtype, device=batch.device)
    borders, rows, last = cut_chunks(batch.shape.starts, chunk)
    call = partial(
        function,
        x,
        dt,
        A=-batch.A_log.exp(),
        B=B,
        C=C,
        chunk_size=chunk,
        cu_seqlens=pool.starts,
        cu_chunk_seqlens=batch.int32(borders),
        last_chunk_indices=batch.int32(last),
        seq_idx=batch.int32(rows),
        out=out,
        D=batch.D,
        dt_bias=batch.dt_bias,
        initial_states=batch.states,
        dt_softplus=True,
        state_dtype=batch.shape.state,
        final_states_out=pool.state,
        final_state_indices=pool.index,
    )
    return pool.side(_into(out, call), lambda y: y)
