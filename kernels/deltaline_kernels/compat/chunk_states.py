"""The states behind each chunk of vLLM's chunked Mamba2, which its prefix cache keeps."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.compat.recurrence import advance
from deltaline_kernels.mamba2 import run_mamba2
from deltaline_kernels.mamba2.inputs import MambaInputs


def chunk_states(
    inputs: MambaInputs, bounds: Tensor, cu_seqlens: Tensor, initial_states: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the state behind each chunk, `(chunks, H, P, S)` in `dtype`: what each chunk adds to a decayed zero, all
    at once, and then one chunk after the other behind what comes before it. Waits for nothing, and is not fast.

    Args:
        bounds: `(chunks + 1,)`, the first token of each chunk and the end of the last; chunks have tokens, each of one
            sequence, and together those of all sequences.
        cu_seqlens: `(N + 1,)`, likewise of the sequences.
        initial_states: `(N, H, P, S)`, or None for zeros.
    """
    heads, device, (num_tokens, _) = inputs.heads, inputs.device, inputs.dt.shape
    num_chunks, begins, bounds = bounds.shape[0] - 1, bounds[:-1].contiguous(), bounds.contiguous()
    sizes = num_chunks, heads.num_heads, heads.head_dim, heads.state_dim
    added = torch.empty(sizes, dtype=torch.float32, device=device)
    rows = replace(EngineRows(num_chunks, num_tokens, 0, bounds, None, None, -1, False, None), moves=True)
    advance(run_mamba2, inputs, added, rows, chunked=True)
    # Each chunk's own sum: what another sequence has, perhaps NaN, is not in it.
    offsets = bounds.clamp(0, num_tokens)
    lost = torch.segment_reduce(_steps(inputs).double(), "sum", offsets=offsets, axis=0, unsafe=True)
    decays = (inputs.rate.double() * lost).exp().float()[..., None, None]
    sequence = torch.searchsorted(cu_seqlens, begins, right=True) - 1
    is_first = begins == cu_seqlens[sequence]
    before = added.new_zeros(sizes) if initial_states is None else initial_states[sequence].float()
    states, state = torch.empty(sizes, dtype=dtype, device=device), before[:1]
    for chunk in range(num_chunks):
        at = slice(chunk, chunk + 1)
        state = added[at] + decays[at] * torch.where(is_first[at, None, None, None], before[at], state)
        states[at] = state
    return states


def _steps(inputs: MambaInputs) -> Tensor:
    """The time steps of all tokens, `[T, H]` fp32."""
    steps = inputs.dt.float()
    if not inputs.softplus:
        return steps
    bias = 0.0 if inputs.dt_bias is None else inputs.dt_bias.float()
    return F.softplus(steps + bias).clamp(*inputs.heads.dt_limit)
