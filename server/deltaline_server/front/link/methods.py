"""The handlers of the link's calls: those that gRPC calls, wrapped by the same interceptor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from deltaline_server.front.interceptor import Interceptor

IN_PLACE = frozenset({b"/deltaline.v1.StateService/ImportState"})
"""Methods whose handlers copy messages, and judge the copies: to them those that lie in link memory are lent."""


@dataclass(frozen=True)
class _Details(grpc.HandlerCallDetails):
    """What a handler is looked up by."""

    method: str
    invocation_metadata: tuple[()] = ()


class Methods:
    """The methods of a server's services."""

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler], interceptor: Interceptor) -> None:
        """handlers: of the services, as gRPC gets them."""
        self._handlers, self._interceptor = handlers, interceptor
        self._wrapped: dict[bytes, Any] = {}

    def find(self, method: bytes) -> Any:
        """The wrapped handler of a method, None for an unknown one."""
        found = self._wrapped.get(method)
        if found is None:
            name = method.decode(errors="replace")
            handler = next(filter(None, (one.service(_Details(name)) for one in self._handlers)), None)
            if handler is not None:
                # What is large is copied once, into link memory.
                self._wrapped[method] = found = self._interceptor.wrap(handler, name, in_pieces=True)
        return found
