"""The shipped modifiers in Triton, and the keys that their masks leave. Their meaning is in shipped.py."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Behind every key.
NO_END: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def causal(b, h, q, kv, p, WIDTH: tl.constexpr):
    """A key is not behind the query."""
    return kv <= q


@triton.jit
def causal_range(first, last, p, WIDTH: tl.constexpr):
    """Keys up to the last query."""
    return 0 * last, last + 1


@triton.jit
def sliding_window(b, h, q, kv, p, WIDTH: tl.constexpr):
    """A key is less than p before the query."""
    return q - kv < p


@triton.jit
def sliding_window_range(first, last, p, WIDTH: tl.constexpr):
    """Keys less than p before the first query."""
    return first - p + 1, 0 * first + NO_END


@triton.jit
def prefix_lm(b, h, q, kv, p, WIDTH: tl.constexpr):
    """A key is one of the first p, or not behind the query."""
    return (kv < p) | (kv <= q)


@triton.jit
def prefix_lm_range(first, last, p, WIDTH: tl.constexpr):
    """The first p keys, or those up to the last query."""
    return 0 * last, tl.maximum(p, last + 1)


@triton.jit
def sink_tokens(b, h, q, kv, p, WIDTH: tl.constexpr):
    """A key is one of the first p."""
    return (kv < p) | (q < 0)


@triton.jit
def sink_tokens_range(first, last, p, WIDTH: tl.constexpr):
    """The first p keys."""
    return 0 * last, p + 0 * last


@triton.jit
def document(b, h, q, kv, p, WIDTH: tl.constexpr):
    """Key and query have the same number in the table p."""
    own = tl.load(p + tl.minimum(q, WIDTH - 1))
    return own == tl.load(p + tl.minimum(kv, WIDTH - 1))


@triton.jit
def alibi(score, b, h, q, kv, p, WIDTH: tl.constexpr):
    """The distance lowers the score by p per key."""
    # The bias is rounded before it is added, as in PyTorch: that makes most of the error of a score far from the query.
    # A plain product would be fused with the sum and not be rounded; this one is fused already, with nothing.
    return score + tl.fma((kv - q).to(tl.float32), p, 0.0)


@triton.jit
def soft_cap(score, b, h, q, kv, p, WIDTH: tl.constexpr):
    """The score, within p."""
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), which is right at both infinities.
    return p - 2 * p / (1 + tl.exp2(score / p * (2 * LOG2_E)))


@triton.jit
def logit_bias(score, b, h, q, kv, p, WIDTH: tl.constexpr):
    """The score and what the table p has for the key."""
    return score + tl.load(p + tl.minimum(kv, WIDTH - 1))
