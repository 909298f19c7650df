"""Tells each token of a batch which adapter its row has, in one launch: a program finds the rows of a block of tokens.

A token's row is the number of rows that end at or before it. So rows without tokens, padding among them, have no
influence wherever they are.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_T, BLOCK_N = 128, 64


# One compiled variant whatever a batch has: nothing is compiled while serving.
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["row_slots", "starts", "token_slots"],
)
def _spread(row_slots, starts, token_slots, num_rows, num_tokens, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.zeros((BLOCK_T,), tl.int32)
    for begin in range(0, num_rows, BLOCK_N):
        o_n = begin + tl.arange(0, BLOCK_N)
        # Rows behind the last one end behind every token.
        ends = tl.load(starts + 1 + o_n, mask=o_n < num_rows, other=2147483647)
        row += tl.sum((ends[:, None] <= o_t[None, :]).to(tl.int32), axis=0)
    slots = tl.load(row_slots + row, mask=row < num_rows, other=-1)
    tl.store(token_slots + o_t, slots, mask=o_t < num_tokens)


def spread_slots_triton(row_slots: Tensor, starts: Tensor, token_slots: Tensor) -> None:
    """Write `token_slots` `[T]`; arguments are validated by `spread_slots`."""
    num_tokens = token_slots.shape[0]
    _spread[(triton.cdiv(num_tokens, BLOCK_T),)](
        row_slots,
        starts,
        token_slots,
        row_slots.shape[0],
        num_tokens,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_N,
        num_warps=4,
        num_stages=1,
    )
