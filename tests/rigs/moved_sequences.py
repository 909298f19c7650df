"""Sequences that are stepped by raw calls wherever they live, and the calls that move them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2
from rigs.layer_calls import detail, reason_of
from rigs.small_models import HIDDEN

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import state_service_pb2 as state_pb
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub

# A server that comes back is found soon.
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
PREFILL, DECODE, VERIFY = pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_VERIFY


class Calls:
    """Stubs of the servers at addresses, whose channels are closed at the end of the block."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None, **options: Any) -> None:
        """credentials: of the channels; options: of every call."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._credentials, self.options = credentials, options

    async def __aenter__(self) -> Calls:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = (
                grpc.aio.insecure_channel(address, options=_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)
            )
        return self._channels[address]

    def layer(self, address: str) -> Any:
        return LayerServiceStub(self._channel(address))

    def state(self, address: str) -> Any:
        return StateServiceStub(self._channel(address))

    async def open(self, address: str, count: int = 1, **fields: Any) -> list[Stepped]:
        """New sequences at a server."""
        opened = await self.layer(address).OpenSequences(pb.OpenSequencesRequest(count=count, **fields), **self.options)
        return [Stepped(self, address, opened.server_epoch, handle) for handle in opened.sequence]

    async def move(
        self, sequences: Sequence[Stepped], target: str, request_id: bytes | None = None
    ) -> state_pb.MoveSequencesResponse:
        """Ask their server, which is one, to move sequences. Those that were moved are stepped there from now on."""
        [(address, epoch)] = {(one.address, one.epoch) for one in sequences}
        request = state_pb.MoveSequencesRequest(
            request_id=secrets.token_bytes(16) if request_id is None else request_id,
            server_epoch=epoch,
            sequence=[one.handle for one in sequences],
            target=target,
        )
        answer: state_pb.MoveSequencesResponse = await self.state(address).MoveSequences(request, **self.options)
        for moved in answer.moved:
            sequences[moved.row].follow(moved)
        return answer


@dataclass
class Asked:
    """What a step asks, of which its tokens follow."""

    step: int
    position: int
    kind: Any
    count: int
    accepted: int = -1


class Refused(Exception):
    """A step was refused. reason; metadata: of its status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.reason = reason_of(status)
        self.metadata = dict(detail(status, error_details_pb2.ErrorInfo).metadata)


@dataclass
class Stepped:
    """A sequence: where it lives, how far each span is, and its last step there. shape: of a token's hidden state."""

    calls: Calls
    address: str
    epoch: int
    handle: int
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)
    last: dict[int, Asked] = field(default_factory=dict)
    shape: tuple[int, ...] = (HIDDEN,)

    def follow(self, moved: Any) -> None:
        """Go on where a sequence lives that was moved: a MovedSequence, or the metadata of a status."""
        values = moved if isinstance(moved, dict) else {name: getattr(moved, name) for name in ("server", *_NUMBERS)}
        self.address, self.epoch, self.handle = values["server"], *(int(values[name]) for name in _NUMBERS)

    async def send(self, asked: Asked, span: int = 0) -> pb.StepResponse:
        """A step, new or not. Raises Refused."""
        draw = np.random.default_rng([asked.step, asked.position, span])
        hidden = draw.standard_normal((asked.count, *self.shape)).astype(np.float32)
        request = pb.StepRequest(
            server_epoch=self.epoch,
            span=span,
            sequence=[self.handle],
            kind=[asked.kind],
            step=[asked.step],
            position=[asked.position],
            accepted=[asked.accepted],
            query_start_loc=[0, asked.count],
            hidden=wire.encode(hidden),
        )
        answer: pb.StepResponse = await self.calls.layer(self.address).Step(request, **self.calls.options)
        for refused in answer.row_status:
            raise Refused(refused.status)
        return answer

    async def step(self, kind: Any, count: int = 1, accepted: int = -1, span: int = 0) -> bytes:
        """The outputs of the next step, which is executed by it. Raises Refused; then it is still the next one."""
        step, position = self.progress.get(span, (0, 0))
        asked = Asked(step + 1, position + max(accepted, 0), kind, count, accepted)
        answer = await self.send(asked, span)
        assert list(answer.outcome) == [pb.ROW_OUTCOME_EXECUTED]
        self.progress[span] = asked.step, asked.position + (0 if kind == VERIFY else count)
        self.last[span] = asked
        return answer.hidden.inline

    async def again(self, span: int = 0) -> bytes:
        """The outputs of the last step, sent again."""
        answer = await self.send(self.last[span], span)
        assert list(answer.outcome) == [pb.ROW_OUTCOME_REPLAYED]
        return answer.hidden.inline

    async def commit(self, accepted: int, span: int = 0) -> None:
        """Commit the verify that was the last step. Raises Refused."""
        step, position = self.progress[span]
        request = pb.CommitSequencesRequest(
            server_epoch=self.epoch, span=span, sequence=[self.handle], step=[step], accepted=[accepted]
        )
        answer = await self.calls.layer(self.address).CommitSequences(request, **self.calls.options)
        for refused in answer.row_status:
            raise Refused(refused.status)
        self.progress[span] = step, position + accepted

    async def state(self) -> tuple[Any, Any]:
        """Its state as its server tells it, and its description."""
        request = pb.DescribeSequencesRequest(server_epoch=self.epoch, sequence=[self.handle])
        [told] = (await self.calls.layer(self.address).DescribeSequences(request, **self.calls.options)).sequences
        return told.state, told

    async def close(self) -> None:
        request = pb.CloseSequencesRequest(server_epoch=self.epoch, sequence=[self.handle])
        await self.calls.layer(self.address).CloseSequences(request, **self.calls.options)


_NUMBERS = ("server_epoch", "sequence")


async def all_kinds(one: Stepped, span: int = 0) -> list[bytes]:
    """What a sequence, none of whose verifies is pending, answers to steps of every kind."""
    outputs = [await one.step(DECODE, span=span), await one.step(PREFILL, 70, span=span)]
    outputs += [await one.step(VERIFY, 3, span=span), await one.step(DECODE, accepted=2, span=span)]
    return outputs


class HeldPieces:
    """Stands before a server's exchange: what leaves stops before its last piece until `go` is set.

    num_leaving: states that are on their way, or were.
    """

    def __init__(self, server: Any, monkeypatch: Any) -> None:
        self._pieces = server.runtime.passage.exchange.pieces
        self.go, self.num_leaving = asyncio.Event(), 0
        monkeypatch.setattr(server.runtime.passage.exchange, "pieces", self._held)

    async def _held(self, *arguments: Any, **options: Any) -> Any:
        self.num_leaving += 1
        held: bytes | None = None
        async for piece in self._pieces(*arguments, **options):
            if held is not None:
                yield held
            held = piece
        await self.go.wait()
        yield held
