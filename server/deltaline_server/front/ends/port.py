"""The port that front ends share, kept for one server."""

from __future__ import annotations

import socket
from typing import Any


class SharedPort:
    """Keeps a port for processes of this user that listen on it with SO_REUSEPORT; itself it takes no connection.

    That option lets every process of the user join in, so a second server has to be refused otherwise: by a name that
    one socket at a time can have. The kernel gives it back when this process ends, however that happens, and it means
    the same host as the port does, in containers too. port: as bound.
    """

    def __init__(self, host: str, port: int) -> None:
        """port: 0 for any. Raises OSError."""
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        self._lock = socket.socket(socket.AF_UNIX)
        try:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
            self._bind(address)
        except OSError:
            self.close()
            raise

    def _bind(self, address: Any) -> None:
        self._socket.bind(address)
        self.port = int(self._socket.getsockname()[1])
        self._lock.bind(f"\0deltaline-port-{self.port}")

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()
        self._lock.close()
