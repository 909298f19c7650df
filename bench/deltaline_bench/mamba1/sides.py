"""Our side of a case of the Mamba-1 recurrence, and the field's, each called as its own engine calls it.

Knows no figures and no bars.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.lines import Mode
from deltaline_bench.mamba1.batch import Batch
from deltaline_bench.peers import Function, Peers
from deltaline_bench.recurrence.sides import Pool, TokenPool, on_lines
from deltaline_kernels import Rows, mamba1
from deltaline_kernels.compat import selective_scan_fn, selective_scan_varlen, selective_state_update

VLLM, MAMBA_SSM = "vllm.model_executor.layers.mamba.ops.mamba_ssm", "mamba_ssm.ops.selective_scan_interface"
UPDATE, SCAN = "selective_state_update", "selective_scan_fn"
# The compiled kernel behind the scan of each.
COMPILED = {VLLM: ("vllm._custom_ops", "selective_scan_fwd"), MAMBA_SSM: ("selective_scan_cuda", "fwd")}


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signatures over it, which say nothing of a verify."""

    def recurrence(state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        x, dt, z, BC = batch.packed
        return mamba1(x, dt, BC, z, batch.A_log, batch.D, batch.dt_bias, state.flatten(1, 2), drafts, rows)[:, None]

    sides: dict[str, SideMaker] = {"deltaline": lambda: on_lines(batch, recurrence)}
    if batch.shape.mode is Mode.PREFILL:
        sides["deltaline compat"] = lambda: _prefill(batch, selective_scan_varlen)
        sides["deltaline compat, mamba-ssm's"] = lambda: _even_prefill(batch, selective_scan_fn)
    elif batch.shape.mode is Mode.DECODE:
        sides["deltaline compat"] = lambda: _update(batch, selective_state_update, Pool(batch))
    return sides


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    if batch.shape.mode is Mode.PREFILL:
        return {
            "vLLM": lambda: _prefill(batch, _load_scan(found, VLLM)),
            "vLLM, tokens contiguous": lambda: _prefill(batch, _load_scan(found, VLLM), by_channel=True),
            "mamba-ssm": lambda: _even_prefill(batch, _load_scan(found, MAMBA_SSM), by_channel=True),
        }
    if batch.shape.mode is Mode.VERIFY:
        return {"vLLM": lambda: _verify(batch, found.load(VLLM, UPDATE))}
    return {"vLLM": lambda: _update(batch, found.load(VLLM, UPDATE), Pool(batch))}


def _load_scan(found: Peers, module: str) -> Function:
    """Load a scan, a compiled kernel behind a function that copies its inputs; raise PeerMissing without either.

    Of sources alone a stand-in would be called, which does nothing: what was timed were the copies.
    """
    found.load(*COMPILED[module])
    scan: Function = found.load(module, SCAN)
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


def _prefill(batch: Batch, function: Function, *, by_channel: bool = False) -> Side:
    """Make a side of the scan of packed rows.

    Args:
        by_channel: each channel's tokens lie together before the call, as the compiled kernels read them; of others
            vLLM's function makes copies at each call. Without copies it writes over the time steps, and its outputs
            over the gates: a reset puts both back, and what is timed again scans what the time before left.
    """
    pool = Pool(batch)
    layout = torch.contiguous_format if by_channel else torch.preserve_format
    # [D, T] and [2 * S, T]
    x, dt, z, BC = (part.t().clone(memory_format=layout) for part in batch.packed)
    B, C = (part[None] for part in BC.chunk(2))
    rates, continues = -batch.A_log.exp(), batch.continues.to(torch.bool)

    def call() -> Tensor:
        found: Tensor = function(
            x,
            pool.state.flatten(1, 2),
            dt,
            rates,
            B,
            C,
            batch.D,
            z,
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
        dt.copy_(batch.packed[1].t())
        z.copy_(batch.packed[2].t())

    return replace(side, reset=reset)


def _even_prefill(batch: Batch, function: Function, *, by_channel: bool = False) -> Side:
    """Make a side of the scan of rows of one length from the zero state, which is all that mamba-ssm's offers.

    Rows that continue are scanned from zero as well: the same work, and the fresh rows are compared.

    Args:
        by_channel: as of `_prefill`.
    """
    shape = batch.shape
    if len(set(shape.lengths)) > 1:
        raise NotApplicable("takes rows of one length")

    def lay(part: Tensor) -> Tensor:
        view: Tensor = part.unflatten(0, (shape.num_rows, -1)).transpose(1, 2)
        return view.contiguous() if by_channel else view

    x, dt, z, BC = (lay(part) for part in batch.packed)
    B, C = BC.chunk(2, dim=1)
    call = partial(
        function,
        x,
        dt,
        -batch.A_log.exp(),
        B,
        C,
        batch.D,
        z,
        batch.dt_bias,
        delta_softplus=True,
        return_last_state=True,
    )
    fresh = ~batch.continues

    def outputs(done: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        y, state = done
        return {"fresh o": y[fresh].transpose(1, 2).flatten(0, 1)[:, None], "fresh state": state[fresh][:, None]}

    return Side(call, outputs, lambda: None)
