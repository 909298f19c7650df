"""Options about batches: what runs together, and what may wait."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_server.config.option import MAX_BYTES, Options, setting


@dataclass(frozen=True)
class BatchOptions(Options):
    """What runs in one batch, and what waits for the next."""

    chunk_tokens: int = setting(
        2048, "batches", "tokens of long rows per batch, at most (prefill chunk)", low=64, high=2**24
    )
    batch_rows: int = setting(256, "batches", "short rows (decode, verify) per batch, at most", low=1, high=4096)
    queue_rows: int = setting(4096, "batches", "rows that may wait or run", low=1, high=2**31)
    queue_bytes: int = setting(2**28, "batches", "bytes of hidden states that may wait or run", low=1, high=MAX_BYTES)
