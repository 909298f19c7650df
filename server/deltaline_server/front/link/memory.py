"""The link memory of a connection."""

from __future__ import annotations

import asyncio

from deltaline import link
from deltaline_server.errors import Reason, Refusal, RequestError
from deltaline_server.front import replies
from deltaline_server.front.interceptor import bug
from deltaline_server.front.link.packet_socket import PacketSocket
from deltaline_server.memory.regions import Regions

# Regions of link memory that a connection may have at a time, those included that are being made.
MAX_REGIONS = 8


class ClientMemory:
    """Regions of link memory that a client asked for; they end with its connection."""

    def __init__(self, regions: Regions, packets: PacketSocket, client: str) -> None:
        """client: its address, which the regions are of."""
        self._regions, self._packets, self._client = regions, packets, client
        # Their numbers: whoever held a region itself would keep it mapped.
        self._made: set[int] = set()
        self._makers: set[asyncio.Task[None]] = set()
        self._num_making = 0

    def ask(self, number: int, size: int) -> None:
        """Give the client memory of at least `size` bytes, or a status that says why not. number: of its request."""
        self._made = set(filter(self._regions.has, self._made))
        if len(self._made) + self._num_making == MAX_REGIONS:
            why = f"this connection has {MAX_REGIONS} regions, which is the most"
            self._refuse(number, Refusal(Reason.SHARED_MEMORY_EXHAUSTED, why))
            return
        self._num_making += 1
        making = asyncio.create_task(self._make(number, size))
        self._makers.add(making)
        making.add_done_callback(self._makers.discard)

    def end(self) -> None:
        """End all regions."""
        for making in self._makers:
            making.cancel()
        for region in self._made:
            self._regions.release(region)

    async def _make(self, number: int, size: int) -> None:
        try:
            region = await self._regions.create(size, None, self._client)
        except Exception as error:
            return self._refuse(number, error.refusal if isinstance(error, RequestError) else bug(error))
        finally:
            self._num_making -= 1
        self._made.add(region.id)
        place = link.Place(region.id, 0, len(region.memory))
        # The file is closed with the region: when the connection is over.
        self._packets.write(link.pack(link.MEMORY, number), place.packed(), fd=region.fd)

    def _refuse(self, number: int, refusal: Refusal) -> None:
        self._packets.write(link.pack(link.STATUS, number), replies.status(refusal).SerializeToString())
