"""What goes with a call: who it is from, and the trace that it belongs to, where the program makes traces with
OpenTelemetry.

Never imports OpenTelemetry: a program that has not imported it has no span either.
"""

from __future__ import annotations

import sys
from typing import Any

from deltaline_client._transport.token import Token

Metadata = tuple[tuple[str, str], ...] | None


def metadata(token: Token | None = None) -> Metadata:
    """Return the metadata of a call: the headers (traceparent, tracestate) that name the current span, where there is
    one, and the client's token, where it has one; None for none."""
    headers = _headers()
    if token is not None:
        return (*headers.items(), token.header())
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
