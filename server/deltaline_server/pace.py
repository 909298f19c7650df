"""The pace: how long batches take, learnt from those that ran, and what follows from it for the next one.

Knows seconds, rows and tokens; not jobs nor clocks (times are arguments, in seconds).
"""

from __future__ import annotations

# Prefill chunks beside decodes compute for so many times as long as the decodes themselves: a decode that comes at the
# worst time waits for one chunk and runs with another, and the prefills still get three fifths of such a batch.
CHUNK_TO_SHORT = 1.5
# Shorter chunks would not run faster: launches and the reading of weights take most of their time.
MIN_CHUNK_TOKENS = 256
# Short rows are expected again for so long after the last ones.
SHORT_MEMORY_S = 0.1
# The next batch is formed when the running one has this share of its time left, or this time: what it takes to lay
# the next one out and to copy it in.
LEAD_SHARE = 0.3
LEAD_S = 0.4e-3
# How much a new measurement counts, and how much longer than expected one may count: a stall is no measure.
WEIGHT = 0.25
MAX_SURPRISE = 2.0

_BUCKETS = 32


class Pace:
    """Smoothed times of batches: those of short rows by the power of two of their number, long rows' by the token."""

    def __init__(self, num_spans: int, chunk_tokens: int) -> None:
        """chunk_tokens: tokens of long rows in a batch, at most."""
        self._chunk_tokens = chunk_tokens
        self._short_s: list[list[float]] = [[0.0] * _BUCKETS for _ in range(num_spans)]
        self._token_s = [0.0] * num_spans
        self._last_short_s, self._last_short_at_s = 0.0, float("-inf")

    def measured(self, span: int, num_short: int, long_tokens: int, seconds: float, now_s: float) -> None:
        """A batch of so many short rows and so many tokens of long rows was computed in `seconds`."""
        short_s, bucket = self._short_time(span, num_short), num_short.bit_length()
        token_s = self._token_s[span]
        long_s = token_s * long_tokens
        if num_short and not long_tokens:
            self._short_s[span][bucket] = _blend(self._short_s[span][bucket], seconds)
        elif long_tokens and not num_short:
            self._token_s[span] = _blend(token_s, seconds / long_tokens)
        elif short_s and long_s:  # nobody knows whose time it was: each gets its share of the surprise
            surprise = seconds / (short_s + long_s)
            self._short_s[span][bucket] = _blend(short_s, short_s * surprise)
            self._token_s[span] = _blend(token_s, token_s * surprise)
        elif short_s and seconds > short_s:
            self._token_s[span] = (seconds - short_s) / long_tokens
        elif long_s and seconds > long_s:
            self._short_s[span][bucket] = seconds - long_s
        if num_short:
            self._last_short_s, self._last_short_at_s = self._short_time(span, num_short), now_s

    def predicted_s(self, span: int, num_short: int, long_tokens: int) -> float:
        """How long a batch will compute, 0.0 for what was never measured."""
        return self._short_time(span, num_short) + self._token_s[span] * long_tokens

    def expects_short(self, now_s: float) -> bool:
        """Whether short rows were served so lately that more must be expected."""
        return now_s - self._last_short_at_s < max(SHORT_MEMORY_S, 4 * self._last_short_s)

    def chunk_tokens(self, span: int, num_short: int, now_s: float) -> int:
        """How many tokens of long rows the next batch may have beside `num_short` short rows."""
        if not num_short and not self.expects_short(now_s):
            return self._chunk_tokens
        short_s = self._short_time(span, num_short) or self._last_short_s
        token_s = self._token_s[span]
        tokens = int(CHUNK_TO_SHORT * short_s / token_s) if token_s else 0
        return min(self._chunk_tokens, max(MIN_CHUNK_TOKENS, tokens))

    @staticmethod
    def due_s(began_s: float, predicted_s: float) -> float:
        """When the batch behind one that began at `began_s` should be formed, if it waits for more rows."""
        return began_s + min((1 - LEAD_SHARE) * predicted_s, predicted_s - LEAD_S)

    def _short_time(self, span: int, num_short: int) -> float:
        """Seconds of so many short rows, those of the nearest number that was measured, 0.0 when none was."""
        if not num_short:
            return 0.0
        times, bucket = self._short_s[span], num_short.bit_length()
        if times[bucket]:
            return times[bucket]
        known = [i for i, seconds in enumerate(times) if seconds]
        return times[min(known, key=lambda i: abs(i - bucket))] if known else 0.0


def _blend(old: float, new: float) -> float:
    """The smoothed time after a measurement; the first one counts whole."""
    return old + WEIGHT * (min(new, MAX_SURPRISE * old) - old) if old else new
