"""Gates of the gated delta rule in Triton, shared by its kernels. Knows values in registers, no pointers."""

import triton
import triton.language as tl


@triton.jit
def log_decay(a, A_log, dt_bias):
    """Return -exp(A_log) * softplus(a + dt_bias), fp32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    # softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|) in [0, 1]. log1p is 2 atanh(s), as a series in s = e / (2 + e),
    # s <= 1/3: the hardware's logarithm has an absolute error, which is a large relative one where e is small.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 15.0
    series = series * t + 1.0 / 13.0
    series = series * t + 1.0 / 11.0
    series = series * t + 1.0 / 9.0
    series = series * t + 1.0 / 7.0
    series = series * t + 1.0 / 5.0
    series = series * t + 1.0 / 3.0
    series = series * t + 1.0
    return -tl.exp(A_log.to(tl.float32)) * (tl.maximum(x, 0.0) + 2.0 * s * series)


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
