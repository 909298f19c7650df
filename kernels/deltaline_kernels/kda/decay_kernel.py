"""The log decays of KDA alone, in Triton: a program has a block of key channels of a token."""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.gates import key_log_decay

MAX_BLOCK = 1024


@triton.jit
def _decays(g, A_log, dt_bias, lower_bound, out, stride, CHANNELS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < CHANNELS
    rate = tl.load(A_log + o // K, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + o, mask=inside, other=0.0)
    decay = key_log_decay(tl.load(g + t * stride + o, mask=inside, other=0.0), rate, bias, lower_bound, False)
    tl.store(out + t * CHANNELS + o, decay.to(out.dtype.element_ty), mask=inside)


def find_decays_triton(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, out: Tensor) -> None:
    """Write the log decays of g to out; arguments as of `find_decays`."""
    num_tokens, channels = g.shape
    if num_tokens == 0 or channels == 0:
        return
    block = min(MAX_BLOCK, triton.next_power_of_2(channels))
    _decays[(num_tokens, triton.cdiv(channels, block))](
        g, A_log, dt_bias, lower_bound, out, g.stride(0), CHANNELS=channels, K=channels // A_log.shape[0], BLOCK=block
    )
