"""StateService of the small server whose layer is a running sum: forks and snapshots are copies of sums."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import prefix_pb2, state_service_pb2_grpc
from deltaline.v1 import state_service_pb2 as pb
from deltaline_server.errors import Reason

if TYPE_CHECKING:
    from rigs.running_sum import FakeServer, Stream

PAGE = 3
PIECE_BYTES = 100


@dataclass
class Kept:
    """A snapshot: its message, and the sums."""

    message: pb.Snapshot
    streams: dict[int, Stream]


class FakeStates(state_service_pb2_grpc.StateServiceServicer):
    """Its snapshots by id, and what calls did by method and request id. Faults are the server's.

    empty_answers: methods that answer with nothing in it. pieces: of the chunks of each import.
    """

    def __init__(self, server: FakeServer) -> None:
        self._server, self._next = server, 1
        self.kept: dict[bytes, Kept] = {}
        self.done: dict[tuple[str, bytes], Any] = {}
        self.empty_answers: set[str] = set()
        self.pieces: list[list[bytes]] = []
        # Ids by the key and position that they were stored under.
        self.keyed: dict[tuple[bytes, int], bytes] = {}

    def begin(self, streams: dict[int, Stream], adapter: str = "") -> int:
        """A handle of a new sequence with copies of these sums."""
        handle = 10_000 + self._next
        self._next += 1
        copies: Any = copy.deepcopy(streams)
        for stream in copies.values():
            stream.step, stream.content, stream.reply = 0, (), None
        self._server.streams[handle], self._server.bound[handle] = copies, adapter
        return handle

    def ForkSequences(self, request: Any, context: Any) -> Any:
        def work() -> pb.ForkSequencesResponse:
            parents = [self._capturable(handle, context, row) for row, handle in enumerate(request.sequence)]
            bound = [self._server.bound[handle] for handle in request.sequence]
            children = [
                self.begin(one, name) for one, name in zip(parents, bound, strict=True) for _ in range(request.count)
            ]
            positions = [one[0].position for one in parents]
            epoch = self._server.info.server_epoch
            return pb.ForkSequencesResponse(server_epoch=epoch, sequence=children, position=positions, lease_ms=1000)

        return self._once("ForkSequences", request, context, work)

    def CreateSnapshots(self, request: Any, context: Any) -> Any:
        def work() -> pb.CreateSnapshotsResponse:
            made = []
            keys = request.prefix_key or [b""] * len(request.sequence)
            captured = [self._capturable(handle, context, row) for row, handle in enumerate(request.sequence)]
            for handle, key, streams in zip(request.sequence, keys, captured, strict=True):
                message = self._keep(copy.deepcopy(streams), self._server.bound[handle], request)
                if key:
                    self.keyed[key, message.position] = message.snapshot_id
                made.append(message)
            return pb.CreateSnapshotsResponse(snapshots=made)

        return self._once("CreateSnapshots", request, context, work)

    def RestoreSequences(self, request: Any, context: Any) -> Any:
        def work() -> pb.RestoreSequencesResponse:
            response = pb.RestoreSequencesResponse(server_epoch=self._server.info.server_epoch, lease_ms=1000)
            for one in request.snapshot_id:
                if one not in self.kept:
                    self._server.abort(Reason.SNAPSHOT_UNKNOWN, context)
                message = self.kept[one].message
                response.sequences.add(
                    sequence=self.begin(self.kept[one].streams, message.adapter),
                    position=message.position,
                    adapter=message.adapter,
                    adapter_hash=message.adapter_hash,
                )
            return response

        return self._once("RestoreSequences", request, context, work)

    def match(self, prefix: prefix_pb2.PrefixKeys) -> prefix_pb2.PrefixMatch:
        """The deepest state before a prompt's end."""
        places = [one for one in zip(prefix.key, prefix.position, strict=True) if one[1] < prefix.prompt_tokens]
        for place in reversed(places):
            if place in self.keyed:
                tier, rest_us = prefix_pb2.TIER_DEVICE, prefix.prompt_tokens - place[1]
                id = self.keyed[place]
                return prefix_pb2.PrefixMatch(snapshot_id=id, position=place[1], tier=tier, compute_us=rest_us)
        return prefix_pb2.PrefixMatch(miss=prefix_pb2.PREFIX_MISS_NEVER_STORED)

    def left(
        self, handle: int, request: Any, asked: Sequence[prefix_pb2.Waypoints], skips: dict[int, str]
    ) -> Iterator[prefix_pb2.Waypoint]:
        """The states that a row leaves on its way, the same whenever it is asked."""
        for waypoints in asked:
            length = request.query_start_loc[waypoints.row + 1] - request.query_start_loc[waypoints.row]
            first = request.position[waypoints.row]
            keys = dict(zip(waypoints.prefix.position, waypoints.prefix.key, strict=True))
            for count in (*waypoints.tokens, *[length] * waypoints.at_end):
                position, stream = first + count, copy.deepcopy(self._server.streams[handle][request.span])
                assert stream.reply is not None
                stream.total = stream.reply[count - 1].astype(np.float64)
                stream.position = position
                id = b"" if position in skips else b"%16d" % (handle << 20 | position)
                if id:
                    tier = prefix_pb2.TIER_DEVICE
                    message = pb.Snapshot(snapshot_id=id, position=position, tier=tier, pinned=waypoints.pinned)
                    self.kept[id] = Kept(message, {0: stream, 1: copy.deepcopy(stream)})
                    if position in keys:
                        self.keyed[keys[position], position] = id
                yield prefix_pb2.Waypoint(
                    row=waypoints.row, position=position, snapshot_id=id, skipped=skips.get(position, "")
                )

    def FindSnapshots(self, request: Any, context: Any) -> Any:
        fault = self._server.enter("FindSnapshots", request, context)
        self._server.leave(fault, context)
        return pb.FindSnapshotsResponse(match=self.match(request.prefix))

    def ListSnapshots(self, request: Any, context: Any) -> Any:
        self._server.enter("ListSnapshots", request, context)
        behind = [self.kept[one].message for one in sorted(self.kept) if one > request.after]
        return pb.ListSnapshotsResponse(snapshots=behind[:PAGE], has_more=len(behind) > PAGE)

    def RenewSnapshots(self, request: Any, context: Any) -> Any:
        def work() -> pb.RenewSnapshotsResponse:
            held = [one in self.kept for one in request.snapshot_id]
            states = {True: pb.SNAPSHOT_STATE_HELD, False: pb.SNAPSHOT_STATE_UNKNOWN}
            return pb.RenewSnapshotsResponse(state=[states[one] for one in held])

        return self._once("RenewSnapshots", request, context, work)

    def ReleaseSnapshots(self, request: Any, context: Any) -> Any:
        def work() -> pb.ReleaseSnapshotsResponse:
            was_held = [self.kept.pop(one, None) is not None for one in request.snapshot_id]
            states = {True: pb.SNAPSHOT_STATE_RELEASED, False: pb.SNAPSHOT_STATE_UNKNOWN}
            return pb.ReleaseSnapshotsResponse(state=[states[one] for one in was_held])

        return self._once("ReleaseSnapshots", request, context, work)

    def ExportState(self, request: Any, context: Any) -> Iterator[pb.ExportStateResponse]:
        fault = self._server.enter("ExportState", request, context)
        if request.sequence:
            yield from self._whole(request.sequence, context)
            return
        if request.snapshot_id not in self.kept:
            self._server.abort(Reason.SNAPSHOT_UNKNOWN, context)
        kept = self.kept[request.snapshot_id]
        sums = [(span, one.position, one.total.tolist()) for span, one in kept.streams.items()]
        content = json.dumps([kept.message.adapter, sums]).encode()
        for at in range(0, len(content), PIECE_BYTES):
            yield pb.ExportStateResponse(chunk=content[at : at + PIECE_BYTES])
        self._server.leave(fault, context)

    def _whole(self, handle: int, context: Any) -> Iterator[pb.ExportStateResponse]:
        """A sequence's positions, as the bytes of a file."""
        positions = [stream.position for stream in self._capturable(handle, context).values()]
        yield pb.ExportStateResponse(chunk=json.dumps(positions).encode())

    def MoveSequences(self, request: Any, context: Any) -> Any:
        fault = self._server.enter("MoveSequences", request, context)
        if request.target not in self._server.targets:
            self._server.abort(Reason.MOVE_TARGET_REFUSED, context)
        response = pb.MoveSequencesResponse()
        for row, handle in enumerate(request.sequence):
            if row in fault.rows:
                response.row_status.add(row=row, status=fault.rows[row])
            elif handle in self._server.streams:
                self._server.move(handle, self._server.targets[request.target])
        response.moved.extend(self._server.owners(request.sequence))
        self._server.leave(fault, context)
        return type(response)() if "MoveSequences" in self.empty_answers else response

    def ImportState(self, request_iterator: Any, context: Any) -> Any:
        first = next(request_iterator)
        pieces = [first.chunk, *(later.chunk for later in request_iterator)]
        self.pieces.append(pieces)

        def work() -> pb.ImportStateResponse:
            adapter, sums = json.loads(b"".join(pieces))
            streams = {span: self._server.stream(position, np.array(total)) for span, position, total in sums}
            return pb.ImportStateResponse(snapshot=self._keep(streams, adapter, first))

        return self._once("ImportState", first, context, work)

    def _once(self, method: str, request: Any, context: Any, work: Any) -> Any:
        fault = self._server.enter(method, request, context)
        key = method, bytes(request.request_id)
        if key not in self.done:
            with self._server.lock:
                self.done[key] = work()
        self._server.leave(fault, context)
        return type(self.done[key])() if method in self.empty_answers else self.done[key]

    def _keep(self, streams: dict[int, Stream], adapter: str, request: Any) -> pb.Snapshot:
        """Make a snapshot of sums, as a request asks for it."""
        message = pb.Snapshot(
            snapshot_id=self._next.to_bytes(16, "big"),
            position=streams[0].position,
            adapter=adapter,
            adapter_hash=self._server.adapters.get(adapter, b""),
            pinned=request.pinned,
            lease_remaining_ms=request.lease_ms or 60_000,
            size_bytes=3 << 20,
            tier=prefix_pb2.TIER_DEVICE,
            created_ms=1_700_000_000_500,
        )
        self._next += 1
        self.kept[message.snapshot_id] = Kept(message, streams)
        return message

    def _capturable(self, handle: int, context: Any, row: int = 0) -> dict[int, Stream]:
        streams = self._server.streams.get(handle)
        if streams is None:
            self._server.abort(self._server.gone(handle, row), context)
            raise AssertionError
        both = [streams[span] for span in range(len(self._server.info.spans))]
        if any(one.drafts is not None for one in both):
            self._server.abort(Reason.VERIFY_PENDING, context)
        if len({one.position for one in both}) > 1:
            self._server.abort(Reason.SPANS_UNEVEN, context)
        return streams


def opened_from(
    states: FakeStates, request: Any, context: Any, server: FakeServer, match: prefix_pb2.PrefixMatch | None
) -> layers.OpenSequencesResponse:
    """What OpenSequences answers to a request with a snapshot_id, or with a prefix of which a state was found."""
    id = request.snapshot_id if match is None else match.snapshot_id
    if id not in states.kept:
        server.abort(Reason.SNAPSHOT_UNKNOWN, context)
    kept = states.kept[id]
    key = "OpenSequences", bytes(request.open_token)
    if key not in states.done:
        states.done[key] = [states.begin(kept.streams, kept.message.adapter) for _ in range(request.count)]
    return layers.OpenSequencesResponse(
        server_epoch=server.info.server_epoch,
        sequence=states.done[key],
        lease_ms=request.lease_ms,
        adapter_hash=kept.message.adapter_hash,
        position=kept.message.position,
        adapter=kept.message.adapter,
        match=match,
    )
