"""Activations inside Triton kernels."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: an integer below 2**10 times the first is exact in fp32.
LN_2_HIGH = tl.constexpr(0.693359375)
LN_2_LOW = tl.constexpr(-2.12194440e-4)
# Adding it rounds an fp32 number below 2**22 to the nearest integer, which then stands in the low bits.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def silu(x, EXACT: tl.constexpr):
    """Return x * sigmoid(x) of fp32 x.

    EXACT: within 1 unit in the last place of fp32 for x >= -87, and -0.0 below, where the truth is above -1.5e-36.
    Else the relative error is at most 2e-6 for x >= -22 and 5e-6 for x >= -88: that of -x log2(e) is multiplied by x.
    Below -88.8, where the truth is above -2.6e-37, it is -0.0. NaN and -infinity are NaN in both.

    A hardware tanh is not enough: its absolute error is larger than sigmoid(-12). 1 / (1 + e) is the square of the
    reciprocal root, which needs no scaling of its argument as a division does: 6 instructions instead of 13.
    """
    if EXACT:
        return _exact_silu(x)
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return x * root * root


@triton.jit
def limited(gate, up, LIMIT: tl.constexpr):
    """Return a gate that is at most LIMIT and an up within it; with 0 both as they are. NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def relu2(x):
    """Return relu(x) ** 2; NaN stays NaN."""
    positive = tl.where(x < 0, 0.0, x)
    return positive * positive


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) of fp32 x, to a relative error of about 1e-6 however small it is."""
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
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _exact_silu(x):
    """silu(x) with exp(-|x|) and the sums carried as pairs of fp32: a value and what its rounding lost."""
    # exp(-|x|) = 2**n exp(s), |s| <= ln(2) / 2. From exp(-87) on 2**n is a normal number; below, e is of no use.
    m = tl.maximum(-tl.abs(x), -87.0)
    rounded = m * LOG2_E + ROUNDER
    n = rounded - ROUNDER
    scale = ((rounded.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    r = tl.fma(n, -LN_2_HIGH, m)
    s = tl.fma(n, -LN_2_LOW, r)
    s_low = tl.fma(n, -LN_2_LOW, r - s)
    # exp(s) - 1 - s by its series, whose next term is below 2**-27 beside exp(s).
    p = tl.fma(s, 1.0 / 5040.0, 1.0 / 720.0)
    p = tl.fma(p, s, 1.0 / 120.0)
    p = tl.fma(p, s, 1.0 / 24.0)
    p = tl.fma(p, s, 1.0 / 6.0)
    p = tl.fma(p, s, 0.5)
    t = tl.fma(p * s, s, s_low) + s
    e = (1.0 + t) * scale
    e_low = ((1.0 - (1.0 + t)) + t + ((s - t) + tl.fma(p * s, s, s_low))) * scale
    d = 1.0 + e
    d_low = (1.0 - d) + e + e_low
    # The numerator is x for x >= 0 and x exp(x) below.
    negative = x < 0
    a = tl.where(negative, x * e, x)
    a_low = tl.where(negative, tl.fma(x, e, -a) + x * e_low, 0.0)
    root = tl.rsqrt(d)
    reciprocal = root * root
    y = a * reciprocal
    y = tl.fma(tl.fma(-y, d, a) + tl.fma(-y, d_low, a_low), reciprocal, y)
    # Above 20 it is x to the last place; so is infinity, whose difference to itself the line above would take.
    y = tl.where(x > 20.0, x, y)
    return tl.where(x < -87.0, x * 0.0, y)
