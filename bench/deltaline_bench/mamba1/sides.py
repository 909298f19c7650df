"""Our side of a case of the Mamba-1 recurrence, and the field's, each called as its own engine calls it.

Knows no figures and no bars.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import Side, SideMaker
from deltaline_bench.lines import Mode
from deltaline_bench.mamba1.batch import Batch
from deltaline_bench.peers import Function, Peers
from deltaline_bench.recurrence.sides import Pool, TokenPool, on_lines
from deltaline_kernels import Rows, mamba1
from deltaline_kernels.compat import selective_scan_varlen, selective_state_update

VLLM, COMPILED = "vllm.model_executor.layers.mamba.ops.mamba_ssm", "vllm._custom_ops"
UPDATE, SCAN, SCAN_KERNEL = "selective_state_update", "selective_scan_fn", "selective_scan_fwd"


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signatures over it, which say nothing of a verify."""

    def recurrence(state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        x, dt, z, BC = batch.packed
        return mamba1(x, dt, BC, z, batch.A_log, batch.D, batch.dt_bias, state.flatten(1, 2), drafts, rows)[:, None]

    sides: dict[str, SideMaker] = {"deltaline": lambda: on_lines(batch, recurrence)}
    if batch.shape.mode is Mode.PREFILL:
        sides["deltaline compat"] = lambda: _prefill(batch, selective_scan_varlen)
    elif batch.shape.mode is Mode.DECODE:
        sides["deltaline compat"] = lambda: _update(batch, selective_state_update, Pool(batch))
    return sides


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    if batch.shape.mode is Mode.PREFILL:
        return {"vLLM": lambda: _prefill(batch, _load_scan(found))}
    if batch.shape.mode is Mode.VERIFY:
        return {"vLLM": lambda: _verify(batch, found.load(VLLM, UPDATE))}
    return {"vLLM": lambda: _update(batch, found.load(VLLM, UPDATE), Pool(batch))}


def _load_scan(found: Peers) -> Function:
    """Load vLLM's scan, a compiled kernel behind a function that copies its inputs; raise PeerMissing without either.

    Of sources alone a stand-in would be called, which does nothing: what was timed were the copies.
    """
    found.load(COMPILED, SCAN_KERNEL)
    scan: Function = found.load(VLLM, SCAN)
    return scan


def _update(batch: Batch, function: Function, pool: Pool | TokenPool, **told: Any) -> Side:
    """Make a side of the update, of one head that has all channels, as vLLM makes of them."""
    x, dt, z, BC = batch.packed
    B, C = (part[:, None] for part in BC.chunk(2, dim=-1))
    out = torch.empty(x.shape, dtype=x.dtype, device=batch.device)[:, None]
    rates, skip, bias = -batch.A_log.exp()[None], batch.D[None], batch.dt_bias[None]

    def call() -> Tensor:
        function(
            pool.state,
            x=x[:, None],
            dt=dt[:, None],
            A=rates,
            B=B,
            C=C,
            D=skip,
            z=z[:, None],
            dt_bias=bias,
            dt_softplus=True,
            out=out,
            state_batch_indices=pool.index,
            **told,
        )
        return out

    return pool.side(call, lambda y: y)


def _verify(batch: Batch, function: Function) -> Side:
    pool = TokenPool(batch)
    told = {"num_accepted_tokens": pool.accepted, "cu_seqlens": pool.starts}
    return _update(batch, function, pool, dst_state_batch_indices=pool.index, **told)


def _prefill(batch: Batch, function: Function) -> Side:
    """Make a side of the scan of packed rows. vLLM's writes its outputs over the gates, which a reset puts back."""
    pool = Pool(batch)
    x, dt, z, BC = batch.packed
    gates = z.clone()
    B, C = (part.t()[None] for part in BC.chunk(2, dim=-1))
    rates, continues = -batch.A_log.exp(), batch.continues.to(torch.bool)

    def call() -> Tensor:
        found: Tensor = function(
            x.t(),
            pool.state.flatten(1, 2),
            dt.t(),
            rates,
            B,
            C,
            batch.D,
            gates.t(),
            batch.dt_bias,
            True,
            pool.starts,
            pool.index,
            continues,
        )
        return found

    side = pool.side(call, lambda y: y.t()[:, None])

    def reset() -> None:
        side.reset()
        gates.copy_(z)

    return replace(side, reset=reset)
