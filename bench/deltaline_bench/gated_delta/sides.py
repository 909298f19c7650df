"""Our side of a case of the gated delta rule, and the field's, each called as its own engine calls it.

Knows no figures and no bars.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.lines import Mode
from deltaline_bench.peers import Function, Peers
from deltaline_bench.recurrence.sides import Pool, TokenPool, on_lines
from deltaline_kernels import Rows, gated_delta
from deltaline_kernels.compat import chunk_gated_delta_rule, fused_sigmoid_gating_delta_rule_update

FLA = "fla.ops.gated_delta_rule"
VLLM = "vllm.third_party.flash_linear_attention.ops"
SGLANG = "sglang.kernels.ops.attention"
SOFTPLUS_THRESHOLD = 20.0


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the native call, and the field's signatures over it, which say nothing of a verify."""

    def rule(state: Tensor, drafts: Tensor, rows: Rows) -> Tensor:
        qkv, a, b = batch.packed
        keys = batch.shape.num_key_heads
        return gated_delta(qkv, a, b, batch.A_log, batch.dt_bias, state, drafts, rows, num_key_heads=keys)

    sides: dict[str, SideMaker] = {"deltaline": lambda: on_lines(batch, rule)}
    if batch.shape.mode is Mode.PREFILL:
        sides["deltaline compat"] = lambda: _vllm_prefill(batch, chunk_gated_delta_rule)
        sides["deltaline compat, norms before"] = lambda: _vllm_prefill(batch, chunk_gated_delta_rule, normalized=True)
    elif batch.shape.mode is Mode.DECODE:
        sides["deltaline compat"] = lambda: _sglang_decode(batch, fused_sigmoid_gating_delta_rule_update)
    return sides


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    if batch.shape.mode is Mode.PREFILL:
        chunk = "chunk_gated_delta_rule"
        return {
            "fla": lambda: _fla_prefill(batch, found.load(f"{FLA}.chunk", chunk), raw_gates=True),
            "fla, gates given": lambda: _fla_prefill(batch, found.load(f"{FLA}.chunk", chunk), raw_gates=False),
            "vLLM": lambda: _vllm_prefill(batch, found.load(f"{VLLM}.chunk", chunk)),
            "SGLang": lambda: _sglang_prefill(batch, found.load(f"{SGLANG}.fla.chunk", chunk)),
        }
    sigmoid, packed = "fused_sigmoid_gating_delta_rule_update", "fused_recurrent_gated_delta_rule_packed_decode"
    vllm_sigmoid = f"{VLLM}.fused_sigmoid_gating"
    if batch.shape.mode is Mode.VERIFY:
        return {"vLLM": lambda: _vllm_verify(batch, found.load(vllm_sigmoid, sigmoid))}
    fla, recurrent = f"{FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule"
    sglang_sigmoid = f"{SGLANG}.linear.fused_sigmoid_gating_recurrent"
    return {
        "fla": lambda: _fla_decode(batch, found.load(fla, recurrent)),
        "vLLM": lambda: _vllm_decode(batch, found.load(vllm_sigmoid, sigmoid)),
        "vLLM packed": lambda: _packed_decode(batch, found.load(f"{VLLM}.fused_recurrent", packed)),
        "SGLang": lambda: _sglang_decode(batch, found.load(sglang_sigmoid, sigmoid)),
        "SGLang packed": lambda: _packed_decode(batch, found.load(f"{SGLANG}.fla.fused_recurrent", packed)),
    }


def _contiguous(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v apart, as `[1, T, heads, dim]`."""
    q, k, v = (x.contiguous().unsqueeze(0) for x in batch.split())
    return q, k, v


def _raw_gates(batch: Batch, dim: int) -> dict[str, Any]:
    """Return what fla is told of gates that it computes itself; `dim` is that of one value in a and b."""
    _, a, b = batch.packed
    return {
        "g": a.unsqueeze(dim),
        "beta": b.unsqueeze(dim),
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": batch.A_log,
        "dt_bias": batch.dt_bias,
    }


def _given_gates(batch: Batch) -> dict[str, Tensor]:
    """Return g (log space) and beta as functions take them that don't compute them, fp32 `[1, T, HV]`."""
    tokens = batch.tokens()
    return {"g": tokens.g.float().unsqueeze(0), "beta": tokens.beta.float().unsqueeze(0)}


def _fla_prefill(batch: Batch, function: Function, *, raw_gates: bool) -> Side:
    gates = _raw_gates(batch, 0) if raw_gates else _given_gates(batch)
    call = partial(
        function,
        *_contiguous(batch),
        # Its states are [N, HV, K, V].
        initial_state=batch.states.float().transpose(-1, -2).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor(batch.shape.starts, dtype=torch.int64, device=batch.device),
        **gates,
    )
    return Side(call, lambda done: {"o": done[0][0], "state": done[1].transpose(-1, -2)}, lambda: None)


def _vllm_prefill(batch: Batch, function: Function, *, normalized: bool = False) -> Side:
    """Make a side of whole sequences, of which q and k may have been divided by their norms before."""
    q, k, v = _contiguous(batch)
    if normalized:
        q, k = (normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    # The engine gathers the states before the call and scatters them after it: neither is timed.
    call = partial(
        function,
        q,
        k,
        v,
        *_given_gates(batch).values(),
        initial_state=batch.states.float(),
        output_final_state=True,
        cu_seqlens=batch.int32(batch.shape.starts),
        use_qk_l2norm_in_kernel=not normalized,
    )
    return Side(call, lambda done: {"o": done[0][0], "state": done[1]}, lambda: None)


def _sglang_prefill(batch: Batch, function: Function) -> Side:
    pool = Pool(batch, zeroed=True)
    call = partial(
        function,
        *_contiguous(batch),
        *_given_gates(batch).values(),
        initial_state=pool.state,
        initial_state_indices=pool.index,
        cu_seqlens=pool.starts,
        use_qk_l2norm_in_kernel=True,
    )
    return pool.side(call, lambda done: done[0][0])


def _fla_decode(batch: Batch, function: Function) -> Side:
    if batch.shape.state is not torch.float32:
        raise NotApplicable("returns fp32 states")
    # Rows of one token as a batch; a state per row, [N, HV, K, V], without a pool.
    call = partial(
        function,
        *(x.contiguous().unsqueeze(1) for x in batch.split()),
        initial_state=batch.states.transpose(-1, -2).contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **_raw_gates(batch, 1),
    )
    return Side(call, lambda done: {"o": done[0][:, 0], "state": done[1].transpose(-1, -2)}, lambda: None)


def _packed_decode(batch: Batch, function: Function) -> Side:
    """Make a side of the packed decode, which has one signature in both engines."""
    shape, pool = batch.shape, Pool(batch)
    size = (shape.num_rows, 1, shape.num_value_heads, shape.value_dim)
    call = partial(
        function,
        *batch.packed,
        batch.A_log,
        batch.dt_bias,
        shape.key_dim**-0.5,
        pool.state,
        torch.empty(size, dtype=shape.dtype, device=batch.device),
        pool.index,
        use_qk_l2norm_in_kernel=True,
    )
    return pool.side(call, lambda done: done[0][:, 0])


def _vllm_update(batch: Batch, function: Function, pool: Pool | TokenPool, **told: Any) -> Side:
    _, a, b = batch.packed
    call = partial(
        function,
        batch.A_log,
        a,
        b,
        batch.dt_bias,
        *_contiguous(batch),
        initial_state=pool.state,
        inplace_final_state=True,
        cu_seqlens=pool.starts,
        ssm_state_indices=pool.index,
        use_qk_l2norm_in_kernel=True,
        **told,
    )
    return pool.side(call, lambda done: done[0][0])


def _vllm_decode(batch: Batch, function: Function) -> Side:
    return _vllm_update(batch, function, Pool(batch))


def _vllm_verify(batch: Batch, function: Function) -> Side:
    pool = TokenPool(batch)
    return _vllm_update(batch, function, pool, num_accepted_tokens=pool.accepted)


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
    )
    return pool.side(call, lambda o: o[0])
