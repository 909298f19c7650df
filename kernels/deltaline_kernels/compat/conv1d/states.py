"""The states of packed sequences as the causal-conv1d package has them: `causal_conv1d_varlen_states`."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import check_positive
from deltaline_kernels.compat.arguments import EngineRows, check_indices, check_operand
from deltaline_kernels.compat.rows import check_offsets
from deltaline_kernels.operators import operator


def _fake(x: Tensor, cu_seqlens: Tensor, state_len: int, **_: Any) -> Tensor:
    return x.new_empty(cu_seqlens.shape[0] - 1, state_len, x.shape[1]).transpose(1, 2)


@operator(_fake)
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last tokens of each sequence, in front of them zeros.

    Args:
        x: `(tokens, dim)` fp32, bf16 or fp16, of any strides.
        cu_seqlens: `(N+1,)` int32 or int64, the first token of each sequence and the end of the last. What it says is
            checked on the CPU alone.
        state_len: tokens of a state, at least 1.

    Returns:
        `(N, dim, state_len)` in x.dtype, the transpose of contiguous `[N, state_len, dim]`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_operand("x", x, {"tokens": None, "dim": None})
    check_indices("cu_seqlens", cu_seqlens, x.device, 1, more=True)
    check_positive("state_len", state_len)
    num_tokens, num_rows = x.shape[0], cu_seqlens.shape[0] - 1
    if x.device.type == "cpu":
        rows = EngineRows(num_rows, num_tokens, 0, cu_seqlens, None, None, -1, False, None)
        check_offsets(rows, num_tokens, "cu_seqlens")
    if num_tokens == 0:
        return x.new_zeros(num_rows, state_len, x.shape[1]).transpose(1, 2)
    begins, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    token = ends - torch.arange(state_len, 0, -1, dtype=cu_seqlens.dtype, device=x.device)
    # In front of a sequence that is short there is another one's token, or none.
    states = x[token.clamp(0, num_tokens - 1)]
    return states.masked_fill_((token < begins)[..., None], 0).transpose(1, 2)
