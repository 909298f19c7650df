"""A modifier as a user writes one, in Triton. Not imported where triton is not installed."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def every_third(b, h, q, kv, p, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every p-th key that is not behind the query."""
    return (kv % p == 0) & (kv <= q)


@triton.jit  # type: ignore[untyped-decorator]
def every_third_range(first, last, p, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys up to the last query."""
    return 0 * last, last + 1
