"""Gates of the delta rule in Triton: the log decay, of a head or of its key channels, and the strength."""

import triton
import triton.language as tl

from deltaline_kernels.device.activation import softplus


@triton.jit
def log_decay(a, A_log, dt_bias):
    """Return -exp(A_log) * softplus(a + dt_bias), fp32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return -tl.exp(A_log.to(tl.float32)) * softplus(x)


@triton.jit
def strength(b):
    """Return sigmoid(b), fp32."""
    return 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def read_gates(a, b, A_log, dt_bias, RAW: tl.constexpr):
    """Return g and beta, fp32: a and b themselves if RAW."""
    if RAW:
        return a.to(tl.float32), b.to(tl.float32)
    return log_decay(a, A_log, dt_bias), strength(b)


@triton.jit
def bounded_log_decay(a, A_log, dt_bias, lower_bound):
    """Return lower_bound * sigmoid(exp(A_log) * (a + dt_bias)), fp32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return lower_bound / (1.0 + tl.exp(-tl.exp(A_log.to(tl.float32)) * x))


@triton.jit
def key_log_decay(a, A_log, dt_bias, lower_bound, RAW: tl.constexpr):
    """Return the log decays of a head's key channels, fp32: a itself if RAW, softplus's if lower_bound is None."""
    if RAW:
        return a.to(tl.float32)
    elif lower_bound is None:
        return log_decay(a, A_log, dt_bias)
    else:
        return bounded_log_decay(a, A_log, dt_bias, lower_bound)


@triton.jit
def read_strength(b, RAW: tl.constexpr):
    """Return beta, fp32: b itself if RAW."""
    if RAW:
        return b.to(tl.float32)
    else:
        return strength(b)
