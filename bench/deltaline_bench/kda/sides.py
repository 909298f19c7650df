"""Our side of a case of KDA, and the field's, each called as its own engine calls it.

Knows no figures and no bars.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.kda.batch import Batch
from deltaline_bench.lines import Mode
from deltaline_bench.peers import Function, Peers
from deltaline_bench.recurrence.sides import Pool, on_lines
from deltaline_kernels import Rows, kda
from deltaline_kernels.compat import chunk_kda, flash_kda_fwd, fused_sigmoid_gating_delta_rule_update

FLA = "fla.ops.kda"
SGLANG = "sglang.kernels.ops.attention"
SOFTPLUS_THRESHOLD = 20.0


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signatures over it, which say nothing of a verify."""

    def rule(state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        qkv, a, b = batch.packed
        told: dict[str, Any] = {"num_key_heads": batch.shape.num_key_heads, "lower_bound": batch.shape.lower_bound}
        return kda(qkv, a, b, batch.A_log, batch.dt_bias, state, drafts, rows, **told)

    sides: dict[str, SideMaker] = {"deltaline": lambda: on_lines(batch, rule)}
    if batch.shape.mode is Mode.PREFILL:
        sides["deltaline compat"] = lambda: _fla_prefill(batch, chunk_kda)
        sides["deltaline compat, FlashKDA's"] = lambda: _flash_prefill(batch, flash_kda_fwd)
    elif batch.shape.mode is Mode.DECODE:
        sides["deltaline compat"] = lambda: _sglang_decode(batch, fused_sigmoid_gating_delta_rule_update)
    return sides


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does; none verifies drafts without a state of each token."""
    if batch.shape.mode is Mode.PREFILL:
        return {
            "fla": lambda: _fla_prefill(batch, found.load(f"{FLA}.chunk", "chunk_kda")),
            "FlashKDA": lambda: _flash_prefill(batch, found.load("flash_kda", "fwd")),
        }
    if batch.shape.mode is Mode.VERIFY:
        return {}
    sglang = f"{SGLANG}.linear.fused_sigmoid_gating_recurrent"
    return {
        "fla": lambda: _fla_decode(batch, found.load(f"{FLA}.fused_recurrent", "fused_recurrent_kda")),
        "SGLang": lambda: _sglang_decode(batch, found.load(sglang, "fused_sigmoid_gating_delta_rule_update")),
    }


def _tokens(batch: Batch, dim: int) -> dict[str, Tensor]:
    """Return q, k, v and the raw gates apart and contiguous, one dimension more at `dim`."""
    _, a, b = batch.packed
    shape = batch.shape
    named = dict(zip("qkv", batch.split(), strict=True))
    named |= {"g": a.unflatten(-1, (shape.num_value_heads, shape.key_dim)), "beta": b}
    return {name: x.contiguous().unsqueeze(dim) for name, x in named.items()}


def _fla_gates(batch: Batch) -> dict[str, Any]:
    """Return what fla is told of gates that it computes itself."""
    return {
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "A_log": batch.A_log,
        "dt_bias": batch.dt_bias,
        "lower_bound": batch.shape.lower_bound,
    }


def _fla_prefill(batch: Batch, function: Function) -> Side:
    call = partial(
        function,
        **_tokens(batch, 0),
        # Its states are [N, HV, K, V].
        initial_state=batch.states.float().transpose(-1, -2).contiguous(),
        output_final_state=True,
        safe_gate=batch.shape.lower_bound is not None,
        cu_seqlens=torch.tensor(batch.shape.starts, dtype=torch.int64, device=batch.device),
        **_fla_gates(batch),
    )
    return Side(call, lambda done: {"o": done[0][0], "state": done[1].transpose(-1, -2)}, lambda: None)


def _flash_prefill(batch: Batch, function: Function) -> Side:
    shape = batch.shape
    if shape.lower_bound is None or shape.num_key_heads != shape.num_value_heads or shape.waypoints:
        raise NotApplicable("has the bounded gate, and as many heads of keys as of values")
    tokens = _tokens(batch, 0)
    out, final = torch.empty_like(tokens["v"]), torch.empty_like(batch.states, dtype=torch.float32)
    call = partial(
        function,
        *tokens.values(),
        shape.key_dim**-0.5,
        out,
        batch.A_log,
        batch.dt_bias.unflatten(0, (shape.num_value_heads, shape.key_dim)),
        shape.lower_bound,
        initial_state=batch.states.float(),
        final_state=final,
        cu_seqlens=torch.tensor(shape.starts, dtype=torch.int64, device=batch.device),
    )
    return Side(call, lambda _: {"o": out[0], "state": final}, lambda: None)


def _fla_decode(batch: Batch, function: Function) -> Side:
    if batch.shape.state is not torch.float32:
        raise NotApplicable("returns fp32 states")
    # Rows of one token as a batch; a state per row, [N, HV, K, V], without a pool.
    call = partial(
        function,
        **_tokens(batch, 1),
        initial_state=batch.states.transpose(-1, -2).contiguous(),
        output_final_state=True,
        **_fla_gates(batch),
    )
    return Side(call, lambda done: {"o": done[0][:, 0], "state": done[1].transpose(-1, -2)}, lambda: None)


def _sglang_decode(batch: Batch, function: Function) -> Side:
    pool = Pool(batch)
    _, a, b = batch.packed
    # Views of the packed tokens, with their stride.
    q, k, v = (x.unsqueeze(0) for x in batch.split())
    call = partial(
        function,
        A_log=batch.A_log,
        a=a,
        dt_bias=batch.dt_bias,
        softplus_beta=1.0,
        softplus_threshold=SOFTPLUS_THRESHOLD,
        q=q,
        k=k,
        v=v,
        b=b,
        initial_state_source=pool.state,
        initial_state_indices=pool.index,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=pool.starts,
        is_kda=True,
        lower_bound=batch.shape.lower_bound,
    )
    return pool.side(call, lambda o: o[0])
