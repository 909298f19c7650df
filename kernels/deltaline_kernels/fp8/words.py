"""Device functions: values of e4m3 in words, in 16 bits, which hold every one of them exactly."""

import triton
import triton.language as tl

# Of the two lower and the two upper bytes of a word at once: signs, and exponents with significands, of 16-bit halves.
SIGNS = tl.constexpr(-2147450880)  # 0x80008000
BF16_DIGITS, FP16_DIGITS = tl.constexpr(0x07F007F0), tl.constexpr(0x3F803F80)
# How much too small a number is whose exponent was taken over as it is.
BF16_SCALE, FP16_SCALE = tl.constexpr(2.0**120), tl.constexpr(2.0**8)


@triton.jit
def values_of(words, j: tl.constexpr, dtype: tl.constexpr):
    """Return byte j of int32 words as the e4m3 number that it is, in bf16 or fp16. NaN counts as 480."""
    digits: tl.constexpr = BF16_DIGITS if dtype == tl.bfloat16 else FP16_DIGITS
    scale: tl.constexpr = BF16_SCALE if dtype == tl.bfloat16 else FP16_SCALE
    # What is above the digits of a byte in its half: 7 of them end at bit 11 of bf16 and at bit 14 of fp16.
    left: tl.constexpr = 4 if dtype == tl.bfloat16 else 7
    if j % 2 == 1:
        shifted = words >> (8 - left)
        signs = words
    else:
        shifted = words << left
        signs = words << 8
    bits = (signs & SIGNS) | (shifted & digits)
    half = (bits >> 16 if j >= 2 else bits).to(tl.int16)
    return half.to(dtype, bitcast=True) * tl.full((), scale, dtype)
