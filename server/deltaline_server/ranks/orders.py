"""How rank 0 tells the others what to do: by sockets of their host, or by gloo where they are on several hosts.

A small message takes a socket of the kernel's a tenth of the time that it takes gloo.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# How long a rank looks for the next order all the time, and how long it looks again behind each nap, before it sleeps:
# to wake a rank takes a virtual machine longer than both.
AWAKE_S, NAPPING_S, NAP_S = 1e-3, 0.1, 2e-5
# A rank that can be reached has connected by then; one that has not is on another host.
CONNECT_S = 10.0
PATH_BYTES = 108

Integers = NDArray[np.int32]


class Group(Protocol):
    """The ranks as they meet."""

    rank: int
    world_size: int

    def broadcast(self, tensor: Tensor) -> None: ...

    def gather(self, part: Tensor) -> tuple[Tensor, ...]: ...


class Orders:
    """A way from rank 0 to all others, used by one thread of a rank at a time. All ranks open it together."""

    def __init__(self, ranks: Group, peers: Sequence[socket.socket]) -> None:
        """peers: sockets to the other ranks on rank 0, to rank 0 on the others; none where gloo has to do."""
        self._ranks, self._peers = ranks, peers

    @classmethod
    def open(cls, ranks: Group) -> Self:
        """Connect the ranks. ranks: on a way that nothing else uses."""
        return cls(ranks, _join(ranks) if ranks.rank else _lead(ranks))

    def close(self) -> None:
        """Tell and hear nothing any more; the others take note of it."""
        for peer in self._peers:
            peer.close()

    def tell(self, integers: Integers) -> None:
        """Rank 0: give all others the integers. Raises RuntimeError when one of them is gone."""
        if not self._peers:
            self._ranks.broadcast(torch.from_numpy(integers))
        try:
            for peer in self._peers:
                peer.sendall(integers.data)
        except OSError as error:
            raise RuntimeError(f"a rank is gone: {error.strerror}") from error

    def hear(self, integers: Integers) -> None:
        """Another rank: wait for as many integers as there is room for; mutates them.

        Raises RuntimeError when rank 0 is gone.
        """
        if not self._peers:
            self._ranks.broadcast(torch.from_numpy(integers))
            return
        [peer] = self._peers
        room = integers.data.cast("B")
        while room:
            room = room[_received(peer, room) :]


def _received(peer: socket.socket, room: memoryview) -> int:
    """Receive what has come, looking for it for a while and then asleep; how many bytes."""
    begun_s = time.monotonic()
    try:
        while (waited_s := time.monotonic() - begun_s) < NAPPING_S:
            with suppress(BlockingIOError):
                return _some(peer.recv_into(room, flags=socket.MSG_DONTWAIT))
            if waited_s < AWAKE_S:
                os.sched_yield()
            else:
                time.sleep(NAP_S)
        return _some(peer.recv_into(room))
    except OSError as error:
        raise RuntimeError(f"rank 0 is gone: {error.strerror}") from error


def _some(count: int) -> int:
    if not count:
        raise RuntimeError("rank 0 is gone: it has closed its connection")
    return count


def _lead(ranks: Group) -> list[socket.socket]:
    """Rank 0's connections to all others; none where one can't come, or no socket can be made."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.settimeout(CONNECT_S)
        path = torch.zeros(PATH_BYTES, dtype=torch.uint8)
        try:
            folder = tempfile.TemporaryDirectory(prefix="deltaline-", ignore_cleanup_errors=True)  # this user's alone
            name = os.path.join(stack.enter_context(folder), "orders")
            listening.bind(name)
            listening.listen(ranks.world_size)
            path, listens = _packed(name), True
        except OSError:  # of a host without room for a folder, or of a path that is too long
            listens = False
        ranks.broadcast(path)
        if not _all_come(ranks, listens):
            return []
        peers = [listening.accept()[0] for _ in range(1, ranks.world_size)]
    return peers


def _join(ranks: Group) -> list[socket.socket]:
    """Another rank's connection to rank 0; none where one can't come."""
    path = torch.empty(PATH_BYTES, dtype=torch.uint8)
    ranks.broadcast(path)
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(bytes(path.tolist()).rstrip(b"\0"))
        has_come = True
    except OSError:
        has_come = False
    if _all_come(ranks, has_come):
        return [peer]
    peer.close()
    return []


def _all_come(ranks: Group, has_come: bool) -> bool:
    return all(bool(one) for one in ranks.gather(torch.tensor([has_come])))


def _packed(path: str) -> Tensor:
    name: Any = os.fsencode(path).ljust(PATH_BYTES, b"\0")
    return torch.frombuffer(bytearray(name), dtype=torch.uint8)
