"""The batch-time model: how long batches take, learnt from those that ran, and what follows from it for the next one.

Times are arguments, in seconds.
"""

from __future__ import annotations

# Two batches in a row take at most so many times as long as the decodes alone: a decode that comes at the worst time
# waits for one of them and runs with the next. Chunks in the one without decodes are cheaper: it can be longer, where
# there is one span.
PAIR_STRETCH = 7.0
# Chunks have this size or the double of it, and so on: what is between two of these computes as long as the larger one
# (graphs.py). Shorter ones would not run faster: launches and the reading of weights take most of their time.
MIN_CHUNK_TOKENS = 256
# Short rows are expected again for so long after the last ones.
SHORT_MEMORY_S = 0.1
# The next batch is formed when the running one has this share of its time left, or this time: what it takes to lay
# the next one out and to copy it in.
LEAD_SHARE = 0.3
LEAD_S = 0.65e-3
# How much a new measurement counts, and how much longer than expected one may count: a stall is no measure.
WEIGHT = 0.25
MAX_SURPRISE = 2.0
# Sizes of chunks that were not met for so long are unknown again: what was measured of them may have been a stall.
MEMORY_S = 2.0

# Seconds by tokens of long rows (a size of chunks, or 0).
_Curve = dict[int, float]


class BatchTimeModel:
    """Smoothed times of batches of each span, by the power of two of their short rows and by the size of their chunks.

    Between the sizes that were measured, and beyond them, time is taken to grow linearly.
    """

    def __init__(self, num_spans: int, chunk_tokens: int) -> None:
        """chunk_tokens: tokens of long rows in a batch, at most."""
        self._sizes = [chunk_tokens]  # descending
        size = MIN_CHUNK_TOKENS
        while size < chunk_tokens:
            self._sizes.insert(1, size)
            size *= 2
        self._curves: list[dict[int, _Curve]] = [{} for _ in range(num_spans)]
        self._met_s: dict[tuple[int, int, int], float] = {}
        # Of each span: tokens of long rows in the last few batches that had some, and the seconds that they took.
        self._prefilled = [(0.0, 0.0)] * num_spans
        self._last_short, self._last_short_s, self._last_short_at_s = 0, 0.0, float("-inf")

    def measured(self, span: int, num_short: int, long_tokens: int, seconds: float, now_s: float) -> None:
        """A batch of so many short rows and so many tokens of long rows was computed in `seconds`."""
        bucket, size = num_short.bit_length(), self._size(long_tokens)
        curve = self._curves[span].setdefault(bucket, {})
        curve[size] = _blend(curve.get(size, 0.0), seconds)
        self._met_s[span, bucket, size] = now_s
        for other in [s for s in curve if s and now_s - self._met_s[span, bucket, s] > MEMORY_S]:
            del curve[other]
        if long_tokens:
            tokens, before_s = self._prefilled[span]
            long_s = max(0.0, seconds - self.predicted_s(span, num_short, 0))
            self._prefilled[span] = (1 - WEIGHT) * tokens + long_tokens, (1 - WEIGHT) * before_s + long_s
        if num_short:
            self._last_short, self._last_short_s = num_short, self.predicted_s(span, num_short, 0)
            self._last_short_at_s = now_s

    def predicted_s(self, span: int, num_short: int, long_tokens: int) -> float:
        """How long a batch will compute, 0.0 for what nothing is known of."""
        curves, bucket, size = self._curves[span], num_short.bit_length(), self._size(long_tokens)
        curve = curves.get(bucket, {})
        if size in curve:
            return curve[size]
        known = [b for b, other in curves.items() if b and 0 in other]
        short_s = curves[min(known, key=lambda b: abs(b - bucket))][0] if known and num_short else 0.0
        if not size:
            return short_s
        # By the lower estimate, since a size that is tried becomes known.
        estimates = [short_s + _at(curves.get(0, {}), size)] if any(curves.get(0, {})) else []
        if any(curve):
            estimates.append(_at({0: short_s} | curve, size))
        return min(estimates, default=short_s)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens of prompts that pass all spans in a second when nothing else runs, as the last few batches did; None
        where one span has computed less than MIN_CHUNK_TOKENS."""
        if any(tokens < MIN_CHUNK_TOKENS or seconds <= 0 for tokens, seconds in self._prefilled):
            return None
        return 1 / sum(seconds / tokens for tokens, seconds in self._prefilled)

    def expects_short(self, now_s: float) -> bool:
        """Whether short rows were served so lately that more must be expected."""
        return now_s - self._last_short_at_s < max(SHORT_MEMORY_S, 4 * self._last_short_s)

    def chunk_tokens(self, span: int, num_short: int, before_s: float, now_s: float) -> int:
        """How many tokens of long rows the next batch may have beside `num_short` short rows, behind a batch that takes
        `before_s`."""
        if not num_short and not self.expects_short(now_s):
            return self._sizes[0]
        rows = num_short or self._last_short
        short_s = self.predicted_s(span, rows, 0)
        pair_s, least_beside_s = PAIR_STRETCH * short_s, self.predicted_s(span, rows, self._sizes[-1])
        if len(self._curves) > 1:  # batches of other spans come between
            least_s, beside, most_s = short_s, rows, pair_s / 2
        elif num_short:  # behind an idle device the next batch counts
            least_s, beside, most_s = short_s, rows, min(pair_s / 2, pair_s - before_s)
        elif short_s < least_beside_s:  # short rows that come meanwhile have the next batch, with a chunk at least
            least_s, beside, most_s = 0.0, 0, pair_s - least_beside_s
        else:  # what decodes alone took was a stall, or nothing is known
            return self._sizes[-1]
        for size in self._sizes:
            if least_s < self.predicted_s(span, beside, size) <= most_s:
                return size
        return self._sizes[-1]

    @staticmethod
    def due_s(began_s: float, predicted_s: float) -> float:
        """When the batch behind one that began at `began_s` should be formed, if it waits for more rows."""
        return began_s + min((1 - LEAD_SHARE) * predicted_s, predicted_s - LEAD_S)

    def _size(self, long_tokens: int) -> int:
        """The smallest size of chunks that has room for so many tokens; 0 for none."""
        return min((size for size in self._sizes if size >= long_tokens), default=self._sizes[0]) if long_tokens else 0


def _at(curve: _Curve, size: int) -> float:
    """A curve's value where it was not measured: on the line through its neighbours, (0, 0) being one if need be."""
    points = sorted(({0: 0.0} | curve).items())
    if len(points) == 1:
        return 0.0
    right = min((i for i, (at, _) in enumerate(points) if at > size), default=len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + max(y1 - y0, 0.0) * (size - x0) / (x1 - x0)


def _blend(old: float, new: float) -> float:
    """The smoothed time after a measurement; the first one counts whole."""
    return old + WEIGHT * (min(new, MAX_SURPRISE * old) - old) if old else new
