"""The chunked Mamba2 recurrence as vLLM calls it: `mamba_chunk_scan_combined_varlen`.

    d = clamp(softplus(dt + dt_bias));  h = exp(A d) h + d x B^T;  y = (h C + D x) silu(z)

Argument names and layouts are vLLM's. Head h uses group h // (H / G). Nothing waits for a GPU: what index tensors say
is checked on the CPU alone.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, MAX_HEAD_DIM, STATES
from deltaline_kernels.compat.arguments import EngineRows, check_flag, check_integer, check_number, check_operand
from deltaline_kernels.compat.chunk_states import chunk_states
from deltaline_kernels.compat.delta_inputs import check_beside, check_counts, join_columns, widen
from deltaline_kernels.compat.recurrence import advance
from deltaline_kernels.compat.rows import check_offsets
from deltaline_kernels.compat.slots import check_pool
from deltaline_kernels.mamba2 import run_mamba2
from deltaline_kernels.mamba2.inputs import MambaHeads, MambaInputs
from deltaline_kernels.operators import operator


def _fake(
    x: Tensor,
    B: Tensor,
    cu_seqlens: Tensor,
    state_dtype: torch.dtype | None,
    final_states_out: Tensor | None,
    cu_chunk_seqlens: Tensor | None,
    return_intermediate_states: bool,
    **_: Any,
) -> Tensor | None:
    if return_intermediate_states and cu_chunk_seqlens is not None:
        cu_seqlens = cu_chunk_seqlens
    elif final_states_out is not None:
        return None
    return x.new_empty(cu_seqlens.shape[0] - 1, *x.shape[1:], B.shape[2], dtype=state_dtype or x.dtype)


@operator(_fake, mutates=["out", "final_states_out"])
def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor | None,
    last_chunk_indices: Tensor | None,
    seq_idx: Tensor | None,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    final_states_out: Tensor | None = None,
    final_state_indices: Tensor | None = None,
) -> Tensor | None:
    """Run whole sequences in chunks.

    Args:
        x: `(tokens, H, P)`; B, C: `(tokens, G, S)`, H a multiple of G; fp32, bf16 or fp16. Columns x, B, C of one
            tensor are used where they are, others are copied, to fp32 if not all alike. P and S of at most 256.
        dt: `(tokens, H)`; A, dt_bias: `(H,)`; D: `(H,)` or `(H, P)`; z: as x; any of the three dtypes. A is at most 0.
        chunk_size: not used, nor are last_chunk_indices and seq_idx: chunks are found on the device, and begin where
            sequences begin.
        cu_chunk_seqlens: `(chunks + 1,)` int32 or int64, for return_intermediate_states alone: the first token of each
            chunk, none of them empty, and the end of the last. Each is of one sequence.
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each sequence and the end of the last.
        out: `(tokens, H, P)` in x's dtype, contiguous. Mutated: the tokens of sequences.
        initial_states: `(N, H, P, S)`, any of the three dtypes, which are copied if they are not packed or share memory
            with final_states_out; None is zero.
        dt_softplus: False: the time step is dt + dt_bias. It is clamped to dt_limit, at least 0, either way.
        return_intermediate_states: return the state behind each chunk of cu_chunk_seqlens. Right, but not fast.
        state_dtype: of the returned states, any of the three; None is x's.
        final_states_out: `(slots, H, P, S)`, any of the three dtypes, packed states at any distance. Mutated: the slots
            final_state_indices `(N,)`, no two alike, all of them lines of it. The slot of an empty sequence gets its
            initial state.

    Returns:
        `(N, H, P, S)`, the final states (of an empty sequence the initial one), or None with final_states_out; with
        return_intermediate_states `(chunks, H, P, S)`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    del last_chunk_indices, seq_idx
    check_integer("chunk_size", chunk_size)
    check_flag("dt_softplus", dt_softplus)
    heads = _check_tokens(x, dt, A, B, C, out, D, z, dt_bias, dt_limit)
    check_flag("return_intermediate_states", return_intermediate_states)
    if return_intermediate_states:
        if cu_chunk_seqlens is None:
            raise TypeError("cu_chunk_seqlens: expected a tensor, as return_intermediate_states is True, got None")
        check_counts("cu_chunk_seqlens", cu_chunk_seqlens, 1, x.device)
    check_counts("cu_seqlens", cu_seqlens, 1, x.device)
    num_rows = cu_seqlens.shape[0] - 1
    num_tokens = x.shape[0]
    starts, has_history = cu_seqlens.contiguous(), initial_states is not None
    rows = EngineRows(num_rows, num_tokens, 0, starts, None, None, -1, has_history, None)
    sizes = {"H": heads.num_heads, "P": heads.head_dim, "S": heads.state_dim}
    _check_states(initial_states, final_states_out, final_state_indices, state_dtype, num_rows, sizes, x.device)
    if x.device.type == "cpu":
        _check_contents(rows, num_tokens, final_states_out, final_state_indices)
    final = final_states_out
    if final is None:
        final = torch.empty((num_rows, *sizes.values()), dtype=state_dtype or x.dtype, device=x.device)
        rows = replace(rows, moves=True)
    else:
        rows = replace(rows, moves=True, write_line=final_state_indices)
    if initial_states is not None and not (initial_states[:1].is_contiguous() and _are_apart(initial_states, final)):
        initial_states = initial_states.clone(memory_format=torch.contiguous_format)
    # What follows the recurrence here is rounded once, with it.
    is_plain = z is None and (D is None or D.ndim == 1)
    y = out if is_plain else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    inputs = _pack_inputs(x, dt, A, B, C, D, dt_bias, heads, softplus=dt_softplus)
    if initial_states is None:
        advance(run_mamba2, inputs, final, rows, chunked=True, o=y)
    else:
        advance(run_mamba2, inputs, initial_states, rows, written=final, chunked=True, o=y)
    if D is not None and D.ndim == 2:
        y += D.float() * x.float()
    if z is not None:
        y *= F.silu(z.float())
    if not is_plain:
        _copy_rows(y, out, cu_seqlens)
    if return_intermediate_states and cu_chunk_seqlens is not None:
        return chunk_states(inputs, cu_chunk_seqlens, starts, initial_states, state_dtype or x.dtype)
    return final if final_states_out is None else None


def _are_apart(states: Tensor, others: Tensor) -> bool:
    """Return whether the two are of different memory."""
    return states.untyped_storage().data_ptr() != others.untyped_storage().data_ptr()


def _pack_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    heads: MambaHeads,
    *,
    softplus: bool,
) -> MambaInputs:
    """Return the tokens as the native operation has them; a D per channel is left to the caller."""
    xBC = join_columns(x, B, C)
    if not softplus:
        dt = (dt.float() if dt_bias is None else dt.float() + dt_bias.float()).clamp(*heads.dt_limit)
        dt_bias = None
    dtype = xBC.dtype
    skip = _pack(D, dtype) if D is not None and D.ndim == 1 else None
    bias = None if dt_bias is None else _pack(dt_bias, dtype)
    steps, rates = _pack(dt, dtype), _pack(A, dtype)
    return MambaInputs(xBC, steps, rates, skip, bias, heads, log_rate=False, softplus=softplus)


def _check_states(
    initial: Tensor | None,
    final: Tensor | None,
    indices: Tensor | None,
    dtype: torch.dtype | None,
    num_rows: int,
    sizes: Mapping[str, int],
    device: torch.device,
) -> None:
    """Check what states begin with and where they go; sizes: of one."""
    if initial is not None:
        check_beside("initial_states", initial, {"N": num_rows, **sizes}, ACTIVATIONS, device)
    if final is not None:
        check_pool("final_states_out", final, {"slots": None, **sizes}, device)
        if indices is None:
            raise TypeError("final_state_indices: expected a tensor, as final_states_out is given, got None")
        check_counts("final_state_indices", indices, num_rows, device)
    if dtype is not None and dtype not in STATES:
        raise TypeError(f"state_dtype: expected {' or '.join(map(str, STATES))}, got {dtype}")


def _check_contents(rows: EngineRows, num_tokens: int, pool: Tensor | None, slots: Tensor | None) -> None:
    """Check what the tensors say; waits for the device."""
    check_offsets(rows, num_tokens, "cu_seqlens")
    if pool is not None and slots is not None:
        used = slots[: rows.num_rows].tolist()
        if len(set(used)) != len(used) or not all(0 <= slot < pool.shape[0] for slot in used):
            raise ValueError(f"final_state_indices: expected distinct slots of 0..{pool.shape[0] - 1}, got {used}")


def _copy_rows(y: Tensor, out: Tensor, cu_seqlens: Tensor) -> None:
    """Copy the tokens of sequences, without waiting for the device."""
    token = torch.arange(out.shape[0], device=out.device)
    inside = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])
    out.copy_(torch.where(inside[:, None, None], y.to(out.dtype), out))


def _pack(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values` contiguous, in fp32 unless they are of `dtype`."""
    return widen(values, dtype).contiguous()


def _check_tokens(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
) -> MambaHeads:
    check_operand("x", x, {"tokens": None, "H": None, "P": None})
    device, (num_tokens, num_heads, head_dim) = x.device, x.shape
    check_beside("B", B, {"tokens": num_tokens, "G": None, "S": None}, ACTIVATIONS, device)
    num_groups, state_dim = B.shape[1:]
    check_beside("C", C, {"tokens": num_tokens, "G": num_groups, "S": state_dim}, ACTIVATIONS, device)
    if num_groups < 1:
        raise ValueError("B: expected at least 1 group, got 0")
    if num_heads < 1 or num_heads % num_groups:
        raise ValueError(f"x: expected a multiple of the {num_groups} groups of B, got {num_heads} heads")
    for name, dim, size in (("x", "P", head_dim), ("B", "S", state_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: expected {dim} of 1..{MAX_HEAD_DIM}, got {size}")
    check_beside("dt", dt, {"tokens": num_tokens, "H": num_heads}, ACTIVATIONS, device)
    check_beside("A", A, {"H": num_heads}, ACTIVATIONS, device)
    per_token = {"tokens": num_tokens, "H": num_heads, "P": head_dim}
    check_beside("out", out, per_token, (x.dtype,), device, contiguous=True)
    if D is not None:
        wide = isinstance(D, Tensor) and D.ndim == 2
        check_beside("D", D, {"H": num_heads, "P": head_dim} if wide else {"H": num_heads}, ACTIVATIONS, device)
    if z is not None:
        check_beside("z", z, per_token, ACTIVATIONS, device)
    if dt_bias is not None:
        check_beside("dt_bias", dt_bias, {"H": num_heads}, ACTIVATIONS, device)
    if not isinstance(dt_limit, tuple | list) or len(dt_limit) != 2:
        raise TypeError(f"dt_limit: expected two numbers, got {type(dt_limit).__name__}")
    least, greatest = dt_limit
    for limit in dt_limit:
        check_number("dt_limit", limit)
    if not (0.0 <= least < math.inf and least <= greatest):
        raise ValueError(f"dt_limit: expected 0 <= least <= greatest, got {dt_limit}")
    return MambaHeads(num_groups, num_heads, head_dim, state_dim, (float(least), float(greatest)))
