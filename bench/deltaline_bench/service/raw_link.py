"""Raw steps by the local link: the same bytes as by gRPC, in packets; tensors beyond one lie in link memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from deltaline import link, wire
from deltaline.address import link_path
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2
from deltaline_bench.service.raw import METHODS, DecodeSteps, RawError
from deltaline_client import AsyncClient

# As the Python client has it.
MOST_IN_A_PACKET = link.MAX_PACKET_BYTES - (32 << 10)


class LinkSteps(DecodeSteps):
    """Decode steps of the same sequences, each a call of Step."""

    def __init__(self, address: str, server_epoch: int, handles: list[int], hidden: Any) -> None:
        super().__init__(address, "unary", server_epoch, handles, hidden)
        self._path, self._hidden, self._calls = link_path(address) or "", hidden, 0

    async def __aenter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(self._path)
        if self._socket.recv(link.MAX_PACKET_BYTES)[0] != link.WELCOME:
            raise RawError("the server turned the link away")
        if self._hidden.nbytes > MOST_IN_A_PACKET:
            self._tensor = self._placed(self._hidden)
        self._socket.setblocking(False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    async def exchange(self, message: bytes) -> tuple[bytes, float, float]:
        loop, sent_s = asyncio.get_running_loop(), time.monotonic()
        self._calls += 1
        head = link.pack(link.CALL, self._calls, flags=link.LAST, method=METHODS["unary"].encode())
        await loop.sock_sendall(self._socket, head + message)
        packet = await loop.sock_recv(self._socket, link.MAX_PACKET_BYTES)
        done_s = time.monotonic()
        if packet[0] != link.MESSAGE:
            raise RawError(f"a step was refused: {packet[link.ENVELOPE.size :]!r}")
        return packet[link.ENVELOPE.size :], sent_s, done_s

    def _placed(self, hidden: Any) -> bytes:
        """Put the hidden states into link memory, with room for outputs behind them; their fields of a StepRequest."""
        self._calls += 1
        room_at = -(-hidden.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._socket.send(link.pack(link.MEMORY, self._calls) + link.Place(0, 0, 2 * room_at).packed())
        packet, [fd], _, _ = socket.recv_fds(self._socket, link.MAX_PACKET_BYTES, 1)
        place = link.Place.read(packet[link.ENVELOPE.size :])
        memory = np.frombuffer(mmap.mmap(fd, place.size), np.uint8)
        os.close(fd)
        memory[: hidden.nbytes] = hidden.reshape(-1).view(np.uint8)
        shared = tensor_pb2.SharedSlice(region=place.region, offset=0)
        tensor = tensor_pb2.Tensor(dtype=wire.data_type(hidden.dtype), shape=hidden.shape, shared=shared)
        room = pb.OutputSlice(region=place.region, offset=room_at, size_bytes=room_at)
        return pb.StepRequest(hidden=tensor, output_slice=room).SerializeToString()


@asynccontextmanager
async def decoding_by_link(address: str, rows: int) -> AsyncIterator[LinkSteps]:
    """Decode steps of so many fresh sequences, which are closed afterwards."""
    async with AsyncClient(address) as client:
        info = await client.info()
        hidden = np.random.default_rng(0).standard_normal((rows, info.hidden_size), dtype=np.float32)
        sequences = await client.open_many(rows)
        handles = [sequence.handle for sequence in sequences]
        async with LinkSteps(address, sequences[0].server_epoch, handles, hidden.astype(info.dtype)) as steps:
            yield steps
        await client.close(sequences)
