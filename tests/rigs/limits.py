"""Limits for tests: roomy ones, but for what a test says."""

from __future__ import annotations

from typing import Any

from deltaline_server.step import Limits


def make_limits(**changes: Any) -> Limits:
    """Limits of a server for 64 sequences with up to 4 drafts."""
    values: dict[str, Any] = {
        "max_sequences": 64,
        "max_draft_tokens": 4,
        "max_lease_ms": 1000,
        "inline_limit_bytes": 1024,
        "queue_rows": 64,
        "queue_bytes": 1 << 20,
        "chunk_tokens": 64,
        "short_rows": 64,
        "long_rows": 8,
    }
    return Limits(**(values | changes))
