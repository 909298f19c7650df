"""Gates of the Mamba2 recurrence in Triton, shared by its kernels."""

import triton
import triton.language as tl

from deltaline_kernels.device.activation import softplus


@triton.jit
def read_rate(rate, LOG_RATE: tl.constexpr):
    """Return the rate A of a head's decay, at most 0, fp32; from its A_log if LOG_RATE."""
    rate = rate.to(tl.float32)
    if LOG_RATE:
        rate = -tl.exp(rate)
    return rate


@triton.jit
def time_step(dt, dt_bias, least, greatest, SOFTPLUS: tl.constexpr):
    """Return the time step, fp32: softplus(dt + dt_bias) within limits; dt + dt_bias itself without SOFTPLUS."""
    step = dt.to(tl.float32) + dt_bias
    if SOFTPLUS:
        step = softplus(step)
        # Selections, since a maximum would lose what is not a number.
        step = tl.where(step < least, least, step)
        step = tl.where(step > greatest, greatest, step)
    return step
