"""A client's connections of gRPC, over which its flows are spread where one is the limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

from deltaline_client._transport.channels.channel import OPTIONS, Options
from deltaline_client._transport.channels.ways import S, Ways

# Else gRPC has one connection for all channels of a process to an address.
_OF_ITS_OWN = ("grpc.use_local_subchannel_pool", 1)


def check_channels(channels: int) -> None:
    """Raise ValueError for a number of channels that can't be."""
    if not isinstance(channels, int) or channels < 1:
        raise ValueError(f"channels: expected 1 or more, got {channels!r}")


class Spread(Generic[S]):
    """As many Ways as a client has channels to each server. Threads may share it.

    A flow has one of them for as long as it lasts, since steps of a sequence that are in flight together have to come
    in their order. All have the client's caller, so what hashes its affinity brings all of them to one server.

    first: of its ways, for who takes none, and is not counted. is_one: whether there are no others.
    """

    def __init__(self, make: Callable[[Options], Ways[S]], channels: int) -> None:
        """make: makes Ways, whose channels have the options. Raises ValueError, TypeError as that does."""
        options = OPTIONS if channels == 1 else (*OPTIONS, _OF_ITS_OWN)
        # How many flows each has; of those that have as many, the one that got the last flow stands last.
        self._num_flows = {make(options): 0 for _ in range(channels)}
        self.first, self.is_one = next(iter(self._num_flows)), channels == 1
        self._lock = threading.Lock()

    def take(self) -> Ways[S]:
        """The ways of a flow that begins: those that have the fewest."""
        with self._lock:
            ways = min(self._num_flows, key=self._num_flows.__getitem__)
            self._num_flows[ways] = self._num_flows.pop(ways) + 1
        return ways

    def give_back(self, ways: Ways[S]) -> None:
        """A flow is over."""
        with self._lock:
            self._num_flows[ways] -= 1

    def end(self) -> tuple[list[S], list[Any]]:
        """Make no more of them. Returns the streams and the channels, to be closed in this order."""
        with self._lock:
            ended = [ways.end() for ways in self._num_flows]
        return [one for streams, _ in ended for one in streams], [one for _, channels in ended for one in channels]
