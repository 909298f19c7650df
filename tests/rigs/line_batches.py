"""Batches that a scheduler could make, of as many sequences as there are lines, for engines that compute them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from rigs.small_models import GATED_DELTA_NET

from deltaline_server.batch import StepBatch
from deltaline_server.step import SpanShapes
from deltaline_server.tables.pages import PagePool

HIDDEN, MAX_DRAFT, NUM_LINES, CHUNK = 128, 4, 24, 4096
PAGE_SIZE = 64
DTYPE = np.dtype(ml_dtypes.bfloat16)
WAIT_S = 100.0
CONFIG = GATED_DELTA_NET | {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention"] * 3,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


class Sequences:
    """The host's side of as many sequences as there are lines: makes batches that a scheduler could make."""

    def __init__(
        self, seed: int, ends: Sequence[SpanShapes] = (), num_pages: int = 0, paged_spans: Collection[int] = ()
    ) -> None:
        """ends: of the spans, HIDDEN wide without. num_pages: of which every line gets the same share."""
        self.rng = np.random.default_rng(seed)
        self.paged_spans = paged_spans
        self.widths = tuple(end.input_width for end in ends) or (HIDDEN, HIDDEN)
        self.position = np.zeros((2, NUM_LINES + 1), dtype=int)
        self.pages: PagePool | None = None
        if num_pages:
            self.pages = PagePool(
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                max_context=num_pages // NUM_LINES * PAGE_SIZE,
                num_lines=NUM_LINES,
                spans=self.paged_spans,
            )
        self.used = np.zeros((2, NUM_LINES + 1), dtype=bool)
        self.pending = np.zeros((2, NUM_LINES + 1), dtype=int)
        self.half = np.zeros((2, NUM_LINES + 1), dtype=int)

    def batch(self, num_rows: int, span: int = 0, verify: bool = True, long: int = 0, want: str = "all") -> StepBatch:
        rng = self.rng
        lines = rng.permutation(np.arange(1, NUM_LINES + 1))[:num_rows]
        verifies = rng.random(num_rows) < 0.5 if verify else np.zeros(num_rows, dtype=bool)
        lengths = np.where(verifies, rng.integers(1, MAX_DRAFT + 1, num_rows), 1)
        if long:
            lengths[-1], verifies[-1] = long, False
        control = np.zeros((7, num_rows + 1), dtype=np.int32)
        control[0, 1:] = np.cumsum(lengths)
        control[1, :-1] = np.where(self.used[span, lines], lines, 0)
        control[2, :-1] = lines
        control[3, :-1] = np.where(verifies, 0, lengths)
        control[4, :-1] = rng.integers(0, self.pending[span, lines] + 1)
        control[5, :-1] = self.half[span, lines]
        new_pages = self.place(control, span, lines, lengths, verifies)
        self.used[span, lines] = True
        self.pending[span, lines] = np.where(verifies, lengths, 0)
        self.half[span, lines] ^= verifies
        hidden = rng.standard_normal((control[0, -1], self.widths[span])).astype(DTYPE)
        wanted = None
        if want != "all":
            wanted = control[0, 1:].astype(np.int64) - 1 if want == "last" else np.zeros(0, dtype=np.int64)
        pieces = tuple(np.split(hidden, sorted(rng.integers(0, len(hidden) + 1, 2).tolist())))
        return StepBatch(span, control, num_rows - (1 if long else 0), pieces, wanted, new_pages=new_pages)

    def place(
        self,
        control: NDArray[np.int32],
        span: int,
        lines: NDArray[np.int64],
        lengths: NDArray[np.int64],
        verifies: NDArray[np.bool_],
    ) -> NDArray[np.int32] | None:
        """Write the rows' positions; return the pages that begin within them, None where the span has none.

        A line that would be too long begins anew.
        """
        position = self.position[span, lines] + control[4, :-1]
        if self.pages is not None:
            is_over = position + lengths > self.pages.max_context
            control[1, :-1][is_over] = control[4, :-1][is_over] = position[is_over] = 0
        control[6, :-1] = position
        self.position[span, lines] = position + np.where(verifies, 0, lengths)
        if self.pages is None or span not in self.paged_spans:
            return None
        self.pages.grant(lines, position + lengths)
        return self.pages.begun(control[2, :-1], control[6, :-1], lengths.astype(np.int32))
