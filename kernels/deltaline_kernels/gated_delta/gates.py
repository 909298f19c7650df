"""Gates of the gated delta rule in Triton, shared by its kernels."""

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
