"""The trace that a call belongs to, where the program makes traces with OpenTelemetry.

Never imports OpenTelemetry: a program that has not imported it has no span either.
"""

from __future__ import annotations

import sys
from typing import Any

Metadata = tuple[tuple[str, str], ...] | None


def metadata() -> Metadata:
    """Return the headers (traceparent, tracestate) that name the current span, None where there is none."""
    headers = _headers()
    return tuple(headers.items()) if headers else None


def traceparent() -> bytes:
    """Return W3C's traceparent of the current span, empty where there is none."""
    return _headers().get("traceparent", "").encode("ascii")


def _headers() -> dict[str, str]:
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers
