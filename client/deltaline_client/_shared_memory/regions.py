"""Shared memory: a region of the server's in which this client places the tensors of its steps.

Everything here may fail, and then tensors travel in the messages, as without it; the log says so once. Whether the
server is on this host is not asked: a region can be opened here and begins with the server's nonce, or is not used.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from deltaline import wire
from deltaline.arena import Arena, map_sealed
from deltaline.link import MAX_PACKET_BYTES
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import tensor_pb2
from deltaline_client._arrays import Array, Shape
from deltaline_client._exceptions import DeltalineError, InvalidSharedMemory, ProtocolError
from deltaline_client._integers import check_integer
from deltaline_client._transport.channels.channel import MAX_TENSOR_BYTES
from deltaline_client._transport.flow import Flow, Server, Sleep, TakeMemory, call
from deltaline_client._transport.methods import CREATE_MEMORY, RELEASE_MEMORY
from deltaline_client._transport.retry import Attempts
from deltaline_client._types import ServerInfo

CREATE_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 1.0
_WAIT_S = 0.002
# Beside such a tensor a packet of the link has room for the columns of a thousand rows.
_LINK_BYTES = MAX_PACKET_BYTES - (32 << 10)
# Only such a name is opened, whatever a server says.
_NAME = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")
_MEMORY_FILE = "/memfd:deltaline"

_NOBODY = Server(0, "")

_log = logging.getLogger(__name__)


RequestKey: TypeAlias = tuple[object, ...]
"""What makes a request the same as an earlier one: its steps, in order."""


@dataclass(frozen=True)
class Placement:
    """Where the tensors of one request are: hidden [T, *input_shape], and room for its outputs [rows, *output_shape].

    Whoever holds it holds the memory: SharedMemory does from an attempt without an answer on. is_copy: the hidden
    states were copied there for the request, and nobody else reads or writes them. former: where an earlier attempt
    was that had no answer, if that was elsewhere.
    """

    region: int
    hidden: Array
    hidden_offset: int
    room: Array
    room_offset: int
    is_copy: bool
    former: Placement | None = None

    @cached_property
    def output_slice(self) -> bytes:
        """What StepRequest.output_slice is to be, as fields of a StepRequest."""
        place = layers.OutputSlice(region=self.region, offset=self.room_offset, size_bytes=self.room.nbytes)
        return layers.StepRequest(output_slice=place).SerializeToString()

    @cached_property
    def tensor(self) -> bytes:
        """The serialised Tensor that StepRequest.hidden is to be."""
        shared = tensor_pb2.SharedSlice(region=self.region, offset=self.hidden_offset)
        dtype = wire.data_type(self.hidden.dtype)
        return tensor_pb2.Tensor(dtype=dtype, shape=self.hidden.shape, shared=shared).SerializeToString()

    def holds(self, tensor: tensor_pb2.Tensor) -> bool:
        """Whether a reply's tensor is the room, whole."""
        shared, dtype = tensor.shared, wire.data_type(self.room.dtype)
        slice_and_shape = shared.region, shared.offset, tensor.dtype, tuple(tensor.shape)
        return slice_and_shape == (self.region, self.room_offset, dtype, self.room.shape)


def shared_outputs(tensor: tensor_pb2.Tensor, placement: Placement | None) -> Array:
    """The outputs of a reply that left them in shared memory: a view of it [rows, *output_shape].

    Raises: ProtocolError for outputs elsewhere than in the placement of the request.
    """
    if placement is None or not placement.holds(tensor):
        raise ProtocolError("the reply's outputs are not where they were asked for")
    return placement.room


class SharedMemory:
    """What a client knows of its region. Threads may share it.

    is_off: there is none, and none is asked for. server: whose it is; an epoch of 0 while there is none.
    """

    def __init__(self, size_bytes: int) -> None:
        """size_bytes: how much to ask for; 0 for none, ever. Raises TypeError, ValueError."""
        check_integer("shared_memory_bytes", size_bytes, 0)
        self._size_bytes = size_bytes
        # On a link, without having been asked for: tensors of so many bytes, which a packet has no room for.
        self._by_default: range | None = None
        self.is_off = size_bytes == 0
        self.server = _NOBODY
        self._has_logged_full = False
        self._making = threading.Lock()
        self._region: tuple[int, Arena] | None = None
        # Of requests that may still reach the server, which would then write their outputs.
        self._unsettled: dict[RequestKey, Placement] = {}
        # That of the last request that is over, if any: a decode loop asks for the same room again and again.
        self._spares: deque[Placement] = deque(maxlen=1)
        self._to_release: list[tuple[int, Server]] = []

    def linked(self, inline_limit_bytes: int) -> None:
        """Calls go by the local link: place what is larger than its packets, up to what a message may carry, of gRPC
        too, so that it can still go in one. The region is asked for behind the first such request."""
        most_bytes = min(inline_limit_bytes, MAX_TENSOR_BYTES)
        if not self._size_bytes and most_bytes >= _LINK_BYTES:
            self._by_default = range(_LINK_BYTES, most_bytes + 1)
            self._size_bytes = 4 * most_bytes

    def ready(self, limits: ServerInfo, attempts: Attempts, owner: Server | None = None) -> Flow[None]:
        """Ask the server that has told its limits for a region, unless there is one of it or can be none. While another
        call asks, wait for what it gets.

        owner: another server that is to have the region, as it is one to which a sequence was moved. attempts: they
        bound how long this waits for another call; when they are over, its steps go inline.
        """
        server = owner or Server(limits.server_epoch, limits.server)
        if self._region is not None and self.server.epoch != server.epoch:
            self._to_release.append((self._region[0], self.server))
            self._forget()
        while not self.is_off and self._region is None:
            if self._making.acquire(blocking=False):
                yield from self._make(limits, server)
                return
            if attempts.timeout_s() <= 0:
                return
            yield Sleep(_WAIT_S)

    def _make(self, limits: ServerInfo, server: Server) -> Flow[None]:
        """Ask for a region, and release `_making`."""
        try:
            while self._to_release:
                yield from self._release(*self._to_release.pop())
            made = yield TakeMemory(server, self._size_bytes, CREATE_TIMEOUT_S)
            if made is not None:
                self._region, self.server = (made[0], Arena(made[1])), server
                return
            if self._by_default is not None or not limits.shared_memory_bytes:
                self._give_up("the server has it off")
                return
            request = admin.CreateSharedMemoryRequest(size_bytes=self._size_bytes)
            response = yield from call(CREATE_MEMORY, request, CREATE_TIMEOUT_S, server)
            try:
                arena = Arena(_open(response))
            except (OSError, ValueError) as error:
                self._give_up(f"the server's memory can't be opened here ({error})")
                yield from self._release(response.region, server)
            else:
                self._region, self.server = (response.region, arena), server
        except DeltalineError as error:
            self._give_up(str(error))
        finally:
            self._making.release()

    def place(
        self, request: RequestKey, hidden: Sequence[Array], shape: Shape, output_shape: Shape
    ) -> Placement | None:
        """Put the arrays of a request beside each other in the region, with room for outputs.

        shape: [T, *input_shape] of all together. output_shape: of all outputs.

        A single array that lies there already is used as it is; so is the place of the same request's last attempt,
        if that had no answer, unless it is an array of the caller's, which may have been changed since. None when there
        is no region or no room: then the request goes inline.
        """
        region = self._region
        if region is None and self._by_default is None:
            return None
        if self._by_default is not None:
            output_bytes = math.prod(output_shape) * hidden[0].dtype.itemsize
            if max(output_bytes, sum([array.nbytes for array in hidden])) not in self._by_default:
                return None
            self.is_off = False  # from the next call on there is a region
        if region is None:
            return None
        number, arena = region
        is_there = len(hidden) == 1 and arena.offset(hidden[0]) is not None
        former = self._unsettled.get(request) if self._unsettled else None
        if former is not None and former.region != number:
            former = None
        if former is not None and (former.is_copy or is_there):
            return former
        dtype = hidden[0].dtype
        place = self._spared(number, dtype, shape, output_shape)
        if place is None or is_there or former is not None:
            if (math.prod(shape) * (not is_there) + math.prod(output_shape)) * dtype.itemsize > arena.size:
                return None  # it would not fit in an empty one
            packed: Array | None = hidden[0].reshape(shape) if is_there else arena.empty(shape, dtype)
            room = arena.empty(output_shape, dtype)
            if packed is None or room is None:
                self._no_room(number, arena.size)
                return None
            offsets = [arena.offset(array) or 0 for array in (packed, room)]
            place = Placement(number, packed, offsets[0], room, offsets[1], not is_there, former)
        if len(hidden) > 1:
            np.concatenate(hidden, axis=None, out=place.hidden.reshape(-1))
        elif not is_there:
            place.hidden[:] = hidden[0]
        return place

    def _no_room(self, number: int, size_bytes: int) -> None:
        """A region is full."""
        if any(placement.region == number for placement in list(self._unsettled.values())):
            self._replace(number)
        elif not self._has_logged_full:
            _log.info("shared memory is full (%d bytes): steps that find no room go inline", size_bytes)
            self._has_logged_full = True

    def spare(self, placement: Placement) -> None:
        """A request is over, and nobody reads its outputs in the placement any more: another may have it."""
        if placement.is_copy:
            self._spares.append(placement)

    def _spared(self, number: int, dtype: np.dtype[Any], shape: Shape, output_shape: Shape) -> Placement | None:
        """The spare placement, where it is of these shapes; it is let go where it is not."""
        try:
            spare = self._spares.pop()
        except IndexError:  # none, or another thread has it
            return None
        shapes = spare.region, spare.hidden.dtype, spare.hidden.shape, spare.room.shape
        return spare if shapes == (number, dtype, shape, output_shape) else None

    def end_attempt(self, request: RequestKey, placement: Placement, *, is_over: bool) -> None:
        """An attempt has ended. Not over: the server may still read and write the placement for this request.

        Then its memory is held until the same request is over after all, or until the region's end.
        """
        if is_over:
            self._unsettled.pop(request, None)
        elif self._region is not None and self._region[0] == placement.region:  # a former one's goes to no other
            self._unsettled[request] = placement

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An array in the region; where there is none or it is full, anywhere."""
        self._spares.clear()
        array = None if self._region is None else self._region[1].empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def lost(self, placement: Placement, error: InvalidSharedMemory) -> None:
        """The server no longer has the region of a request: sent again, it goes inline.

        The next call asks for another region.
        """
        if self._region is not None and self._region[0] == placement.region:
            _log.info("shared memory is gone (%s): steps under way go inline", error)
            self._forget()

    def _replace(self, number: int) -> None:
        """Go on in another region, from the next call on: this one is full of requests without an answer."""
        if self._region is None or self._region[0] != number:
            return  # another thread was first
        _log.info("shared memory is full of steps without an answer: another region takes its place")
        self._to_release.append((number, self.server))
        self._forget()

    def _forget(self) -> None:
        """Hold nothing of the region any more."""
        self._region, self.server = None, _NOBODY
        self._unsettled.clear()
        self._spares.clear()

    def end(self) -> Flow[None]:
        """Give the region back, if there is one; there will be no other."""
        if self._region is not None:
            self._to_release.append((self._region[0], self.server))
        self._region, self.is_off = None, True
        self._spares.clear()
        while self._to_release:
            yield from self._release(*self._to_release.pop())

    def _release(self, number: int, server: Server) -> Flow[None]:
        try:
            yield from call(RELEASE_MEMORY, admin.ReleaseSharedMemoryRequest(region=number), RELEASE_TIMEOUT_S, server)
        except DeltalineError as error:  # its lease ends it
            _log.debug("shared memory could not be released: %s", error)

    def _give_up(self, why: str) -> None:
        _log.info("no shared memory, tensors travel in messages: %s", why)
        self.is_off, self._by_default = True, None


def _open(response: admin.CreateSharedMemoryResponse) -> mmap.mmap:
    """Map a region. Raises OSError, ValueError when it is not one, not the server's or could shrink under us."""
    name = response.name
    if not _NAME.fullmatch(name) or not os.readlink(name).startswith(_MEMORY_FILE):
        raise ValueError("no such memory on this host")
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = map_sealed(fd, response.size_bytes)
    finally:
        os.close(fd)
    if not response.nonce or mapping[: len(response.nonce)] != response.nonce:
        raise ValueError("another server's memory")
    return mapping
