"""What a principal has in the queue, held to its quotas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.step import RowKind, StepRequest


@dataclass(slots=True)
class Use:
    """Rows and bytes that wait or run, bytes of replies that these may have, and rows and tokens that the engine was
    given so far. tokens: of prefills that were taken, which leave at the quota's rate; as of since_s."""

    rows: int = 0
    num_bytes: int = 0
    reply_bytes: int = 0
    rows_run: int = 0
    tokens_run: int = 0
    tokens: float = 0.0
    since_s: float = 0.0

    def check(self, request: StepRequest, rows: NDArray[np.int64], now_s: float) -> None:
        """Raise RequestError QUOTA_EXCEEDED where a request is more than its principal may have; rows: those that are
        new. now_s: on a monotonic clock.

        A prefill that is larger than what a second may bring has its turn too, and makes those behind it wait longer.
        """
        quotas = request.principal.quotas
        if quotas is None:
            return
        quotas.check("queued_rows", self.rows, request.form.num_rows, retry_after_s=0.02)
        quotas.check("queued_bytes", self.num_bytes, request.hidden.nbytes, retry_after_s=0.02)
        rate, asked = quotas.prefill_tokens_per_s, _prefill_tokens(request, rows)
        if not rate or not asked:
            return
        self.tokens, self.since_s = max(0.0, self.tokens - (now_s - self.since_s) * rate), now_s
        if self.tokens >= rate:
            retry_after_s = (self.tokens - rate) / rate + 0.001
            raise quotas.exceeded("prefill_tokens_per_s", int(self.tokens), asked, retry_after_s)

    def take(self, request: StepRequest, rows: NDArray[np.int64]) -> None:
        """Count a request that was taken."""
        self.rows += request.form.num_rows
        self.num_bytes += request.hidden.nbytes
        self.reply_bytes += request.form.total_kept_bytes
        if request.principal.quotas is not None and request.principal.quotas.prefill_tokens_per_s:
            self.tokens += _prefill_tokens(request, rows)

    def give_back(self, request: StepRequest, num_left: int) -> None:
        """A request is over; num_left: of its rows, those that were not done."""
        self.rows -= num_left
        self.num_bytes -= request.hidden.nbytes
        self.reply_bytes -= request.form.total_kept_bytes


def _prefill_tokens(request: StepRequest, rows: NDArray[np.int64]) -> int:
    """Those that a request has computed: of all its rows if any is new, as the others are padding beside it."""
    form = request.form
    if not (len(rows) and form.num_of_kind[RowKind.PREFILL]):
        return 0
    return int(form.lengths[form.kind == RowKind.PREFILL].sum())
