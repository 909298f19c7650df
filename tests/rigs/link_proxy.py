"""A proxy of the local link that kills its connections."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

from deltaline import link


class LinkProxy:
    """Forwards the link's packets, with their files, on threads, and kills each connection after some packets."""

    def __init__(self, folder: Path, server_path: str, lives: Iterable[int]) -> None:
        """folder: for the socket, of this user's. lives: packets of both ways that each connection lasts; those after
        the last one are not killed."""
        self.path, self._server_path, self._lives = str(folder / "proxy.sock"), server_path, iter(lives)
        self.kills = 0
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()

    def __enter__(self) -> LinkProxy:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._start(self._accept)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            far.connect(self._server_path)
            self._start(self._forward, near, far, next(self._lives, 1 << 60))

    def _forward(self, near: socket.socket, far: socket.socket, left: int) -> None:
        with near, far:
            while left and not self._is_over.is_set():
                for source in select.select([near, far], [], [], 0.05)[0]:
                    packet, fds, _, _ = socket.recv_fds(source, link.MAX_PACKET_BYTES, 4)
                    if not packet:
                        return
                    socket.send_fds(far if source is near else near, [packet], fds)
                    for fd in fds:
                        os.close(fd)
                    left -= 1
                    if not left:
                        self.kills += 1
                        break
