"""What goes with a call: the client's affinity, the server that is meant, who it is from, and the trace that it belongs
to, where the program makes traces with OpenTelemetry.

Never imports OpenTelemetry: a program that has not imported it has no span either.
"""

from __future__ import annotations

import secrets
import sys
from typing import Any, TypeAlias

from deltaline_client._transport.flow import Server
from deltaline_client._transport.token import Header, Token

Metadata: TypeAlias = tuple[Header, ...]

AFFINITY, SERVER = "deltaline-affinity", "deltaline-server"
_AFFINITY_BYTES = 16


class Caller:
    """Who a client is: its affinity, drawn here for as long as it lives, and its token, None for none. named: servers
    to which its program has had sequences moved, by that address, so its calls may go there.

    All that a client opens carries one affinity, so that a policy that hashes it brings all of it to one server, where
    it can be stepped in one batch.
    """

    def __init__(self, token: Token | None = None) -> None:
        self.token, self.named = token, set[str]()
        self._affinity = AFFINITY, secrets.token_hex(_AFFINITY_BYTES)

    def headers(self, server: str = "") -> Metadata:
        """The metadata of a stream of steps; server: the name of the one that is meant, "" for any."""
        named = ((SERVER, server),) if server else ()
        shown = () if self.token is None else (self.token.header(),)
        return (self._affinity, *named, *shown)

    def metadata(self, server: Server | None = None) -> Metadata:
        """The metadata of a call: those of a stream, and the headers (traceparent, tracestate) that name the current
        span, where there is one. server: which is meant, None for any."""
        return (*_trace().items(), *self.headers("" if server is None else server.name))


def traceparent() -> bytes:
    """Return W3C's traceparent of the current span, empty where there is none."""
    return _trace().get("traceparent", "").encode("ascii")


def _trace() -> dict[str, str]:
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers
