"""A batch of sequences as causal-conv1d has them, which keeps no lines: states go in and come out."""

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import INTEGERS, EngineRows, check_filter, check_is, check_operand
from deltaline_kernels.compat.conv1d.by_device import convolve
from deltaline_kernels.compat.conv1d.tokens import find_sequences, pack_tokens, unpack_tokens


def convolve_batch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    *,
    final: bool,
    silu: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the outputs of a batch as causal-conv1d does, with the states behind it if they are `final`."""
    tokens, batch, length = pack_tokens(x, None)
    num_tokens, dim = tokens.shape
    device = x.device
    check_filter(weight, bias, dim, device)
    width = weight.shape[1]
    shape = {"batch": batch, "dim": dim, "width - 1": width - 1}
    if final_states_out is not None:
        if not final:
            check_is(None, "as return_final_states is False", final_states_out=final_states_out)
        check_operand("final_states_out", final_states_out, shape, device=device)
    history = initial_states is not None
    if initial_states is None:
        lines = torch.zeros((batch, width - 1, dim), dtype=x.dtype, device=device)
    else:
        initial = check_operand("initial_states", initial_states, shape, device=device).transpose(1, 2)
        lines = initial.to(x.dtype, copy=True, memory_format=torch.contiguous_format)
    rows = EngineRows(batch, length, length, None, None, None, -1, history, None)
    if seq_idx is not None:
        if final:
            raise ValueError("return_final_states: expected False beside seq_idx, got True")
        check_operand("seq_idx", seq_idx, {"batch": batch, "tokens": length}, INTEGERS, device)
        rows = find_sequences(seq_idx, history=history)
    y = torch.empty((num_tokens, dim), dtype=x.dtype, device=device)
    convolve(tokens, weight.t(), bias, lines, rows, y, silu, keep=final)
    y = unpack_tokens(y, x)
    if not final:
        return y
    states = lines.transpose(1, 2)
    return y, states if final_states_out is None else final_states_out.copy_(states)
