"""The field's gated delta rules, each called as its own engine calls it. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.peers import Peers

FLA = "fla.ops.gated_delta_rule"
VLLM = "vllm.third_party.flash_linear_attention.ops"
SGLANG = "sglang.kernels.ops.attention"
SOFTPLUS_THRESHOLD = 20.0

Function = Callable[..., Any]


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


class _Pool:
    """A peer's pool of lines, and what every peer is told about rows.

    Args:
        zeroed: a row that starts from the zero state reads it from its own line, as its allocator left it.
    """

    def __init__(self, batch: Batch, *, zeroed: bool = False) -> None:
        self.batch, self._zeroed = batch, zeroed
        self.state = batch.new_state()
        self.index = batch.int32(batch.line_index)
        self.starts = batch.int32(batch.starts())
        self._reset()

    def _reset(self) -> None:
        self.batch.reset_state(self.state)
        if self._zeroed:
            self.state[self.batch.line_index[~self.batch.continues]] = 0

    def side(self, call: Callable[[], Any], o: Callable[[Any], Tensor]) -> Side:
        """Make a side whose packed output is `o(result)` and that works on the pool in place."""
        return Side(
            call, lambda done: {"o": o(done), "state": self.state[self.batch.line_index]}, lambda: self._reset()
        )


def _contiguous(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v apart, as `[1, T, heads, dim]`."""
    q, k, v = (x.contiguous().unsqueeze(0) for x in batch.split())
    return q, k, v


def _fla_prefill(batch: Batch, function: Function, *, raw_gates: bool) -> Side:
    q, k, v = _contiguous(batch)
    starts = torch.tensor(batch.starts(), dtype=torch.int64, device=batch.device)
    # Its states are [N, HV, K, V].
    states = batch.states.float().transpose(-1, -2).contiguous()
    gates: dict[str, Any]
    if raw_gates:
        gates = {
            "g": batch.a.unsqueeze(0),
            "beta": batch.b.unsqueeze(0),
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "A_log": batch.A_log,
            "dt_bias": batch.dt_bias,
        }
    else:
        g, beta = batch.gates()
        gates = {"g": g.unsqueeze(0), "beta": beta.unsqueeze(0)}

    def call() -> Any:
        return function(
            q,
            k,
            v,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
            **gates,
        )

    return Side(call, lambda done: {"o": done[0][0], "state": done[1].transpose(-1, -2)}, lambda: None)


def _vllm_prefill(batch: Batch, function: Function) -> Side:
    # The engine gathers the states before the call and scatters them after it: neither is timed.
    q, k, v = _contiguous(batch)
    g, beta = (x.unsqueeze(0) for x in batch.gates())
    starts = batch.int32(batch.starts())
    states = batch.states.float()

    def call() -> Any:
        return function(
            q,
            k,
            v,
            g,
            beta,
            initial_state=states,
            output_final_state=True,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=True,
        )

    return Side(call, lambda done: {"o": done[0][0], "state": done[1]}, lambda: None)


def _sglang_prefill(batch: Batch, function: Function) -> Side:
    pool = _Pool(batch, zeroed=True)
    q, k, v = _contiguous(batch)
    g, beta = (x.unsqueeze(0) for x in batch.gates())

    def call() -> Any:
        return function(
            q,
            k,
            v,
            g,
            beta,
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
    q, k, v = (x.contiguous().unsqueeze(1) for x in batch.split())
    a, b = batch.a.unsqueeze(1), batch.b.unsqueeze(1)
    states = batch.states.transpose(-1, -2).contiguous()

    def call() -> Any:
        return function(
            q,
            k,
            v,
            g=a,
            beta=b,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=batch.A_log,
            dt_bias=batch.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )

    return Side(call, lambda done: {"o": done[0][:, 0], "state": done[1].transpose(-1, -2)}, lambda: None)


def _packed_decode(batch: Batch, function: Function) -> Side:
    """Make a side of the packed decode, which has one signature in both engines."""
    shape = batch.shape
    pool = _Pool(batch)
    size = (shape.num_rows, 1, shape.num_value_heads, shape.value_dim)
    out = torch.empty(size, dtype=shape.dtype, device=batch.device)

    def call() -> Any:
        return function(
            batch.qkv,
            batch.a,
            batch.b,
            batch.A_log,
            batch.dt_bias,
            shape.key_dim**-0.5,
            pool.state,
            out,
            pool.index,
            use_qk_l2norm_in_kernel=True,
        )

    return pool.side(call, lambda done: done[0][:, 0])


def _vllm_decode(batch: Batch, function: Function) -> Side:
    pool = _Pool(batch)
    q, k, v = _contiguous(batch)

    def call() -> Any:
        return function(
            batch.A_log,
            batch.a,
            batch.b,
            batch.dt_bias,
            q,
            k,
            v,
            initial_state=pool.state,
            inplace_final_state=True,
            cu_seqlens=pool.starts,
            ssm_state_indices=pool.index,
            use_qk_l2norm_in_kernel=True,
        )

    return pool.side(call, lambda done: done[0][0])


def _sglang_decode(batch: Batch, function: Function) -> Side:
    pool = _Pool(batch)
    # Views of the packed tokens, with their stride.
    q, k, v = (x.unsqueeze(0) for x in batch.split())

    def call() -> Any:
        return function(
            A_log=batch.A_log,
            a=batch.a,
            dt_bias=batch.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=SOFTPLUS_THRESHOLD,
            q=q,
            k=k,
            v=v,
            b=batch.b,
            initial_state_source=pool.state,
            initial_state_indices=pool.index,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=pool.starts,
        )

    return pool.side(call, lambda o: o[0])


def _vllm_verify(batch: Batch, function: Function) -> Side:
    """Make a side that keeps a state per token: a row has a line for each, and starts from the last accepted one's."""
    shape = batch.shape
    q, k, v = _contiguous(batch)
    columns = shape.max_drafts
    # Line 0 is its null line.
    order = torch.arange(1, shape.num_rows * columns + 1, device=batch.device)
    table = order.view(columns, shape.num_rows).t().contiguous()
    index, accepted, starts = (batch.int32(x) for x in (table, batch.accepted, batch.starts()))
    size = (shape.num_rows * columns + 1, shape.num_value_heads, shape.value_dim, shape.key_dim)
    pool = torch.full(size, torch.nan, dtype=shape.state, device=batch.device)
    first = table.gather(1, batch.accepted[:, None] - 1)[:, 0]
    started = batch.started().to(shape.state)

    def reset() -> None:
        pool.fill_(torch.nan)
        pool[first] = started

    def call() -> Any:
        return function(
            batch.A_log,
            batch.a,
            batch.b,
            batch.dt_bias,
            q,
            k,
            v,
            initial_state=pool,
            inplace_final_state=True,
            cu_seqlens=starts,
            ssm_state_indices=index,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )

    reset()
    return Side(call, lambda done: {"o": done[0][0], "token_states": pool[table]}, reset)
