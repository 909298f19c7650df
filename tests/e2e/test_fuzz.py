"""Messages that nobody meant, over every method and by every way: none ends in UNKNOWN or INTERNAL, nothing is lost or
told, and another principal's sequence, which steps beside them, has the bits that it has alone.

A failure names the seed and the number of the call: `draw(seed, number, held)` makes it again, but for handles.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from numpy.typing import NDArray
from rigs.authority import Authority
from rigs.mutated_calls import METHODS, Held, MutatedCall, draw
from rigs.mutation import with_bytes_mutated
from rigs.principals import entry, headers, token_of, write_principals
from rigs.raw_link import raw_link
from rigs.small_models import HIDDEN
from rigs.target import ADMIN, LAYER, LEAK, STATE
from rigs.until import until
from rigs.ways import CODES, Said, Way, grpc_way, link_way

from deltaline import link
from deltaline.v1 import admin_service_pb2, state_service_pb2
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import AsyncClient, AsyncSequence, Tls
from deltaline_server.app import Server
from deltaline_server.front.trust import refusals
from deltaline_server.memory.regions import Region
from deltaline_server.tables.ledger import Slots

SEED = 26
# A connection lives for so many calls, and the sequences that they are about.
CALLS_OF_A_CONNECTION, CALLS_AT_ONCE = 250, 50
VICTIMS = 24
# Tokens of the victims on the witness's span: no mutation meets their step and position there by chance, so that none
# runs there, in the witness's batch, about whose bits its bucket decides.
TOKENS_ON_ITS_SPAN = 37
WITNESS_SPAN = 1
PAUSE_S = 0.02
NUM_PACKETS = 2700
NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED}
# What gRPC's own contract, that of health, says without an ErrorInfo.
WITHOUT_DETAILS = {
    ("List", grpc.StatusCode.UNIMPLEMENTED),
    ("Check", grpc.StatusCode.NOT_FOUND),
}


@dataclass
class Place:
    """A server, and how it is called. connect: makes a connection. client: for a principal, by name."""

    server: Server
    connect: Callable[[], AbstractAsyncContextManager[Way]]
    client: Callable[[str], AsyncClient]


@asynccontextmanager
async def by_grpc(make: Callable[..., Server], folder: Path, **options: Any) -> AsyncIterator[Place]:
    async with make(link="off", **options) as server:
        address = server.address
        yield Place(
            server,
            lambda: grpc_way(grpc.aio.insecure_channel(address)),
            lambda name: AsyncClient(address, token=token_of(name)),
        )


@asynccontextmanager
async def by_tls(make: Callable[..., Server], folder: Path, **options: Any) -> AsyncIterator[Place]:
    authority = Authority(folder)
    pair, tls = authority.issue("server"), Tls(authority.ca)
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with make(link="off", tls_cert=str(pair.cert), tls_key=str(pair.key), **options) as server:
        address = server.address
        yield Place(
            server,
            lambda: grpc_way(grpc.aio.secure_channel(address, credentials)),
            lambda name: AsyncClient(address, token=token_of(name), tls=tls),
        )


@asynccontextmanager
async def by_link(make: Callable[..., Server], folder: Path, **options: Any) -> AsyncIterator[Place]:
    async with make(link=str(folder / "run" / "link.sock"), **options) as server:
        path = server.link.path
        yield Place(server, lambda: link_way(path), lambda name: AsyncClient(f"link:{path}", token=token_of(name)))


def by_front_end(make: Callable[..., Server], folder: Path, **options: Any) -> AbstractAsyncContextManager[Place]:
    return by_grpc(make, folder, front_ends=1, **options)


# Each with its messages in every run, 20,000 in all: fewer where they cost more.
WAYS = {by_grpc: 3500, by_tls: 3000, by_link: 8000, by_front_end: 5500}
SWEEP = 250_000


@pytest.fixture
def make_watched(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: None
) -> Callable[..., Server]:
    """A function that makes a server with everything on that parses what clients send."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of front ends
    monkeypatch.setattr(refusals, "BURST", SWEEP)  # nearly all are refused
    file = tmp_path / "principals.toml"
    mutator = entry("mutator", "step", "adapter", "admin", quotas={"sequences": 48})
    path = write_principals(file, mutator, entry("witness", "step"), entry("nobody"))

    def make(**options: Any) -> Server:
        given = {
            "spans": "0:1,1:2",
            "principals": path,
            "audit_log": str(tmp_path / "audit"),
            "inline_limit_bytes": 1 << 16,
            "adapter_bytes": 1 << 20,
            "max_adapter_rank": 4,
            "shared_memory_bytes": 1 << 22,
            "host_state_bytes": 1 << 22,
            "move_peers": "127.0.0.1:1",
            "drain_timeout_s": 600,
        }
        return make_server(**(given | options))

    return make


def beyond(call: MutatedCall, info: Any) -> str:
    """Why a call may not end well: a message that protobuf can't read, or a field beyond what the server announces."""
    for body in call.bodies:
        message: Any = message_factory.GetMessageClass(METHODS[call.path].input_type)()
        try:
            message.ParseFromString(body)
        except DecodeError:
            return "not a message"
        if METHODS[call.path].client_streaming:  # its answers are judged one by one
            continue
        bounds = {
            "count": range(1, info.max_sequences + 1),
            "lease_ms": range(info.max_lease_ms + 1),
            "size_bytes": range(1, info.shared_memory_bytes + 1),
            "timeout_ms": range(24 * 3600 * 1000 + 1),
            "span": range(len(info.spans)),
            "priority": range(-8, 8),
            "limit": range(4097),
        }
        for name, bound in bounds.items():
            if getattr(message, name, bound.start) not in bound:
                return name
        named = getattr(message, "sequence", "?")
        if not isinstance(named, int) and len(named) not in range(1, info.max_sequences + 1):
            return "sequence"
        for name in ("open_token", "after"):
            if len(getattr(message, name, "")) not in (0, 16):
                return name
        if len(getattr(message, "request_id", bytes(16))) != 16:
            return "request_id"
        ids = getattr(message, "snapshot_id", [bytes(16)])  # an open has one, or none
        if any(len(one) != 16 for one in ([ids] * bool(ids) if isinstance(ids, bytes) else ids or [b""])):
            return "snapshot_id"
    return ""


@dataclass
class Tally:
    """What became of calls, by method and of reasons. info: what the server announces."""

    info: Any
    seen: Counter[tuple[str, grpc.StatusCode]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[int] = field(default_factory=Counter)
    num_messages: int = 0

    def __str__(self) -> str:
        """What a record of a sweep says."""
        codes = Counter({code.name: 0 for code in grpc.StatusCode})
        for (_, code), count in self.seen.items():
            codes[code.name] += count
        return f"{self.num_messages} messages, {+codes}, rows {self.outcomes}, reasons {self.reasons}"

    def judge(self, call: MutatedCall, said: Said) -> None:
        """Count a call. Raises AssertionError for what it must not say."""
        self.num_messages += len(call.bodies)
        self.seen[call.path, said.code] += 1
        if said.code in NEVER:
            raise AssertionError(f"{said.code} {said.text!r} of {call}")
        if said.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            assert call.timeout_s < 1, f"{said.text!r} of {call}"
        elif said.code is not grpc.StatusCode.OK and (METHODS[call.path].name, said.code) not in WITHOUT_DETAILS:
            assert said.status is not None, f"{said} of {call}"
            self._status(call, said.status)
        elif said.code is grpc.StatusCode.OK:
            assert not beyond(call, self.info), f"{beyond(call, self.info)}: {said} of {call}"
        for reply in said.replies:
            self._reply(call, reply)

    def _reply(self, call: MutatedCall, reply: bytes) -> None:
        match call.path.removeprefix(LAYER):
            case "Step":
                assert len(reply) <= (pb.StepRequest.FromString(call.bodies[0]).max_reply_bytes or 4 << 20), call
                self._step(call, pb.StepResponse.FromString(reply))
            case "CommitSequences":
                for row in pb.CommitSequencesResponse.FromString(reply).row_status:
                    self._status(call, row.status)
            case "StepStream":
                answer = pb.StepStreamResponse.FromString(reply)
                if answer.HasField("status"):
                    self._status(call, answer.status)
                else:
                    self._step(call, answer.step)

    def _step(self, call: MutatedCall, response: pb.StepResponse) -> None:
        self.outcomes.update(response.outcome)
        for row in response.row_status:
            self._status(call, row.status)

    def _status(self, call: MutatedCall, status: status_pb2.Status) -> None:
        assert CODES[status.code] not in NEVER, f"{status} of {call}"
        assert status.details and not LEAK.search(status.message), f"{status} of {call}"
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info), f"{status} of {call}"
        self.reasons[info.reason] += 1


class Strays:
    """Notes what is opened and made, so that what replies did not tell can be given back."""

    def __init__(self, server: Server) -> None:
        self._table, self._regions = server.runtime.table, server.runtime.regions
        self._opened, self._made = list[tuple[int, Any]](), list[tuple[int, int]]()
        begins, creates = self._table.begin, self._regions.create

        def begun(*arguments: Any) -> Slots:
            slots = begins(*arguments)
            self._opened += [(handle, arguments[-1]) for handle in self._table.handles(slots).tolist()]
            return slots

        async def created(size: int, lease_s: float | None, owner: int, *more: Any) -> Region:
            region = await creates(size, lease_s, owner, *more)
            self._made.append((region.id, owner))
            return region

        self._table.begin = begun  # type: ignore[method-assign, assignment]
        self._regions.create = created  # type: ignore[method-assign, assignment]

    def give_back(self) -> None:
        """Close and release what the mutator has."""
        for handle, principal in self._opened:
            if principal.name == "mutator":
                self._table.close(self._table.server_epoch, np.array([handle], np.uint64), principal)
        for region, owner in self._made:
            self._regions.release(region, (owner,))
        self._opened.clear()
        self._made.clear()


class Witness:
    """A sequence that steps beside the others, and what it got. span_is_free: held by whoever steps on its own span."""

    def __init__(self, sequence: AsyncSequence) -> None:
        self.inputs, self.outputs = list[tuple[int, Any]](), list[bytes]()
        self.span_is_free = asyncio.Lock()
        self._sequence, self._rng = sequence, np.random.default_rng(4)

    async def go_on(self) -> None:
        """Step on its own span until cancelled."""
        while True:
            async with self.span_is_free:
                await self.step(WITNESS_SPAN)
            await asyncio.sleep(PAUSE_S)

    async def step(self, span: int) -> None:
        """Step on a span, where nothing else runs."""
        length = 1 if self._rng.random() < 0.8 else 5
        hidden = self._rng.standard_normal((length, HIDDEN)).astype(np.float32)
        output = await stepped(self._sequence, span, hidden)
        self.inputs.append((span, hidden))
        self.outputs.append(output)


async def stepped(sequence: AsyncSequence, span: int, hidden: NDArray[np.float32]) -> bytes:
    step: Callable[..., Awaitable[Any]] = sequence.decode if len(hidden) == 1 else sequence.prefill
    return bytes(np.asarray(await step(hidden, span=span)).tobytes())


async def one_connection(
    place: Place, tally: Tally, mutator: AsyncClient, witness: Witness, seed: int, first: int
) -> None:
    """The calls of a connection, from the first on."""
    victims = await mutator.open_many(VICTIMS)
    level = await mutator.open_many(2)
    prompts = [np.ones((TOKENS_ON_ITS_SPAN, HIDDEN), np.float32)] * VICTIMS
    async with witness.span_is_free:
        await mutator.prefill(victims, prompts, span=WITNESS_SPAN)
    epoch = place.server.runtime.table.server_epoch
    async with place.connect() as way:
        size = admin_service_pb2.CreateSharedMemoryRequest(size_bytes=1 << 16)
        said = await way.call(
            METHODS[ADMIN + "CreateSharedMemory"], [size.SerializeToString()], headers("mutator"), 60.0
        )
        region = admin_service_pb2.CreateSharedMemoryResponse.FromString(said.replies[0]).region
        asked = state_service_pb2.CreateSnapshotsRequest(
            request_id=os.urandom(16), server_epoch=epoch, sequence=[one.handle for one in level]
        )
        said = await way.call(METHODS[STATE + "CreateSnapshots"], [asked.SerializeToString()], headers("mutator"), 60.0)
        made = state_service_pb2.CreateSnapshotsResponse.FromString(said.replies[0]).snapshots
        ids = [one.snapshot_id for one in made]
        exported = []
        for export in (
            state_service_pb2.ExportStateRequest(snapshot_id=ids[0]),
            state_service_pb2.ExportStateRequest(server_epoch=epoch, sequence=level[0].handle),
        ):
            said = await way.call(
                METHODS[STATE + "ExportState"], [export.SerializeToString()], headers("mutator"), 60.0
            )
            chunks = [state_service_pb2.ExportStateResponse.FromString(reply).chunk for reply in said.replies]
            exported.append(b"".join(chunks))
        held = Held(
            epoch,
            [one.handle for one in victims],
            [one.handle for one in level],
            ids,
            state=exported[0],
            whole=exported[1],
            region=region,
            name="mutator",
        )

        async def one(number: int) -> None:
            call = draw(seed, number, held)
            tally.judge(call, await way.call(METHODS[call.path], call.bodies, call.metadata, call.timeout_s))

        for begin in range(first, first + CALLS_OF_A_CONNECTION, CALLS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for number in range(begin, begin + CALLS_AT_ONCE):
                    group.create_task(one(number))
            place.server.runtime.table.is_draining = False


async def mutate(place: Place, num_messages: int, seed: int) -> Tally:
    """Make mutated calls beside a witness, and prove that nothing was harmed."""
    runtime, strays = place.server.runtime, Strays(place.server)
    tally, table = Tally(runtime.info()), runtime.table
    async with place.client("witness") as client, place.client("mutator") as mutator:
        sequence, twin = await client.open_many(2)
        witness, first = Witness(sequence), 0
        async with asyncio.TaskGroup() as group:
            stepping = group.create_task(witness.go_on())
            while tally.num_messages < num_messages:
                await one_connection(place, tally, mutator, witness, seed, first)
                strays.give_back()
                await until(lambda: not runtime.scheduler.load().queued_rows)
                async with witness.span_is_free:
                    await witness.step(0)  # where the others ran
                first += CALLS_OF_A_CONNECTION
            async with witness.span_is_free:
                stepping.cancel()
        assert len(witness.outputs) > num_messages / 500
        for number, (given, output) in enumerate(zip(witness.inputs, witness.outputs, strict=True)):
            assert await stepped(twin, *given) == output, f"step {number} of the witness, beside seed {seed}"
        runtime.scheduler.settle()
        table.check_integrity()
        assert table.num_open == 2
    return tally


def check_told(tally: Tally, server: Server, folder: Path) -> None:
    """The calls came far enough to show something; and what the server wrote of them is sound."""
    assert {path for path, _ in tally.seen} == METHODS.keys()
    assert tally.outcomes[pb.ROW_OUTCOME_EXECUTED] > 100 and len(tally.reasons) > 20, tally
    for code in ("INTERNAL", "UNKNOWN"):
        for path, method in METHODS.items():
            service = method.containing_service.full_name
            labels = {"grpc_service": service, "grpc_method": method.name, "grpc_code": code}
            told = [
                sample.value
                for metric in server.metrics.registry.collect()
                for sample in metric.samples
                if labels.items() <= sample.labels.items()
            ]
            assert not any(told), (path, code)
    for line in (folder / "audit").read_text().splitlines():
        assert json.loads(line)["message"] and "token-of" not in line


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("by", "num_messages"),
    [*WAYS.items(), *(pytest.param(by, SWEEP, marks=pytest.mark.sweep) for by in WAYS)],
)
async def test_messages_that_nobody_meant_harm_nothing(
    make_watched: Callable[..., Server],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    by: Callable[..., AbstractAsyncContextManager[Place]],
    num_messages: int,
) -> None:
    async with by(make_watched, tmp_path) as place:
        tally = await mutate(place, num_messages, SEED + list(WAYS).index(by))
        check_told(tally, place.server, tmp_path)
    assert [record.getMessage() for record in caplog.records if is_news(record)] == []
    print(f"{by.__name__}: {tally}")


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record is an error, and not gRPC's traceback of a client that left."""
    left = record.exc_info is not None and getattr(record.exc_info[0], "__name__", "") == "ExecuteBatchError"
    return record.levelno >= logging.ERROR and not left


def packets(rng: Random, epoch: int) -> list[bytes]:
    """What a client of the link sends in turn on one connection: calls, messages, places in memory."""
    info, stream = f"{ADMIN}GetLoad".encode(), f"{LAYER}StepStream".encode()
    metadata = link.pack_metadata(headers("mutator"))
    step = pb.StepStreamRequest(step=pb.StepRequest(server_epoch=epoch, sequence=[1])).SerializeToString()
    place = link.Place(rng.choice((0, 1)), 0, rng.choice((0, 64, 2**40))).packed()
    return [
        link.pack(link.CALL, 1, flags=link.LAST, amount=10**6, method=info, metadata=metadata),
        link.pack(link.CALL, 2, method=stream, metadata=metadata) + step,
        link.pack(link.MESSAGE, 2) + step,
        link.pack(link.MESSAGE, 2, flags=link.PLACED) + place,
        link.pack(link.MEMORY, 3) + link.Place(0, 0, rng.choice((1, 5000, 2**40))).packed(),
        link.pack(link.ROOM, 2) + place,
        link.pack(link.CALL, 4, flags=link.LAST | link.PLACED, method=info, metadata=metadata) + place,
        link.pack(link.CANCEL, 2),
    ]


async def test_packets_that_nobody_meant_end_their_connection_alone(
    make_watched: Callable[..., Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends, said = Counter[str](), Counter[grpc.StatusCode]()
    async with by_link(make_watched, tmp_path) as place, place.client("witness") as client:
        sequence = await client.open()
        epoch = place.server.runtime.table.server_epoch
        for number in range(NUM_PACKETS // 9):
            rng = Random(SEED << 40 | number)
            sent = packets(rng, epoch)
            at = rng.randrange(len(sent))
            sent[at] = with_bytes_mutated(sent[at], rng)
            fence = link.pack(link.CALL, 1 << 60, flags=link.LAST, method=f"{ADMIN}GetLoad".encode())
            async with raw_link(place.server.link.path) as connection:
                with suppress(BrokenPipeError, ConnectionResetError):
                    for packet in (*sent, fence):
                        connection.socket.send(packet)
                why = f"seed {SEED} number {number} packets {[packet.hex() for packet in sent]}"
                while (came := await connection.receive()) is not None and came.envelope.call != 1 << 60:
                    for fd in came.fds:
                        os.close(fd)
                    if came.kind == link.STATUS:
                        said[CODES[came.status.code]] += 1
                        assert CODES[came.status.code] not in NEVER - {grpc.StatusCode.CANCELLED}, f"{came} {why}"
                        assert not LEAK.search(came.status.message), f"{came} {why}"
                    elif came.kind == link.GOODBYE:
                        ends[came.body.decode()] += 1
                        assert came.body and not LEAK.search(came.body.decode()), f"{came} {why}"
            if number % 32 == 0:
                await sequence.decode(np.ones(HIDDEN, np.float32))
        assert sequence.position == 1 + (NUM_PACKETS // 9 - 1) // 32
        assert len(ends) > 5 and len(said) > 3, (ends, said)
        await until(lambda: not place.server.runtime.link_regions.used_bytes)
    assert [record.getMessage() for record in caplog.records if is_news(record)] == []
