"""A front end's calls, with a core that the test plays: what goes to it, and what clients get of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from rigs.garbage import nothing_left
from rigs.raw_http2 import raw_http2
from rigs.raw_link import TIMEOUT_S, Packet, RawLink

from deltaline import link
from deltaline.conversation import Conversation
from deltaline.link_socket import LinkSocket
from deltaline.v1 import adapter_service_pb2, layer_service_pb2
from deltaline_server.front.ends import forward
from deltaline_server.front.ends.forward import Forward
from deltaline_server.front.port import gate
from deltaline_server.front.port.gate import Gate

STEP, STREAM = "/deltaline.v1.LayerService/Step", "/deltaline.v1.LayerService/StepStream"
UPLOAD = "/deltaline.v1.AdapterService/LoadAdapter"


class Front(NamedTuple):
    """The core's end of the link, a channel to the front end, what makes another, and where the front end listens."""

    core: RawLink
    channel: Any
    connect: Callable[[], Any]
    address: str

    async def receive(self, kind: int) -> Packet:
        """The next packet that the core gets, which is of this kind."""
        packet = await self.core.receive()
        assert packet is not None and packet.kind == kind, packet
        return packet

    async def say(self, kind: int, call: int, body: bytes = b"", **head: Any) -> None:
        await self.core.send(link.pack(kind, call, **head) + body)

    async def status(self, call: int, **fields: Any) -> None:
        await self.say(link.STATUS, call, status_pb2.Status(**fields).SerializeToString())


@pytest.fixture
async def make_front() -> AsyncIterator[Callable[[], Any]]:
    """A function that makes a front end; after what it is made with is set."""
    ends: list[Callable[[], Any]] = []

    async def make() -> Front:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.settimeout(TIMEOUT_S)
        core: LinkSocket[status_pb2.Status] = LinkSocket(ours, Conversation(1 << 20, lambda status: status))
        server = grpc.aio.server()
        modules = (layer_service_pb2, adapter_service_pb2)
        services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
        server.add_generic_rpc_handlers((Forward(core, services, Gate()),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        channels = list[Any]()

        def connect() -> Any:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels.append(grpc.aio.insecure_channel(address, options=options))
            return channels[-1]

        async def end() -> None:
            for channel in channels:
                await channel.close()
            await server.stop(None)
            core.close(status_pb2.Status())
            theirs.close()

        ends.append(end)
        return Front(RawLink(theirs), connect(), connect, address)

    yield make
    for end in ends:
        await end()


@pytest.fixture
async def front(make_front: Callable[[], Any]) -> Front:
    made: Front = await make_front()
    return made


async def test_a_call_goes_on_with_its_client_deadline_and_metadata(front: Front) -> None:
    metadata = (("traceparent", "00-1-2-01"), ("deltaline-affinity", "abc"), ("opaque-bin", b"\0\xff"))
    calling = asyncio.ensure_future(front.channel.unary_unary(STEP)(b"body", timeout=30, metadata=metadata))
    packet = await front.receive(link.CALL)
    envelope = packet.envelope
    assert (envelope.method, envelope.flags, packet.body) == (STEP.encode(), link.LAST, b"body")
    assert envelope.client.startswith(b"ipv4:127.0.0.1:")
    assert 0 < envelope.amount <= 30_000_000
    assert set(metadata[:2]) < set(link.read_metadata(envelope.metadata))
    await front.say(link.MESSAGE, envelope.call, b"reply", flags=link.LAST)
    assert await calling == b"reply"


async def test_metadata_with_zero_bytes_stay_behind(front: Front) -> None:
    """Which stand between texts on the link: gRPC lets them pass."""
    with raw_http2(front.address) as client:
        client.call(STEP, b"body", **{"one": b"a\0b", "two": b"c\0d\0e", "three": b"f"})
        packet = await front.receive(link.CALL)
        metadata = link.read_metadata(packet.envelope.metadata)
        assert packet.body == b"body" and ("three", "f") in metadata
        assert not {"one", "two", "b", "d"} & {name for name, _ in metadata}


@pytest.mark.parametrize("path", [STEP, STREAM])
async def test_a_call_that_is_over_leaves_nothing_to_the_garbage_collector(front: Front, path: str) -> None:
    """Its pauses, when it has much to look at, are what others wait for."""
    with nothing_left("deltaline", "grpc._cython.cygrpc._ServicerContext"):
        for _ in range(4):  # gRPC keeps its last ones
            calling = front.channel.stream_stream(path)(iter([b"body"]))
            call = (await front.receive(link.CALL)).envelope.call
            if path == STREAM:
                await front.receive(link.MESSAGE)
            await front.say(link.MESSAGE, call, b"reply", flags=link.LAST)
            assert [reply async for reply in calling] == [b"reply"]
        await asyncio.sleep(0.01)


async def test_a_refusal_is_kept_back_as_long_as_the_core_says(front: Front) -> None:
    refused = [asyncio.ensure_future(front.channel.unary_unary(STEP)(b"")) for _ in range(2)]
    first, second = [(await front.receive(link.CALL)).envelope.call for _ in refused]
    refusal = status_pb2.Status(code=code_pb2.PERMISSION_DENIED, message="no").SerializeToString()
    await front.say(link.STATUS, first, refusal, amount=3_600_000_000)
    await front.say(link.STATUS, second, refusal, amount=1000)
    done, waiting = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
    codes = [error.code() for call in done if isinstance(error := call.exception(), grpc.aio.AioRpcError)]
    assert codes == [grpc.StatusCode.PERMISSION_DENIED]
    # Others go on, and it is given up as any call.
    calling = asyncio.ensure_future(front.channel.unary_unary(STEP)(b""))
    number = (await front.receive(link.CALL)).envelope.call
    await front.say(link.MESSAGE, number, b"reply", flags=link.LAST)
    assert await calling == b"reply"
    (left,) = waiting
    assert not left.done()
    left.cancel()


async def test_strangers_leave_a_front_end_s_places_to_who_is_known(
    make_front: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_CALLS", 4)
    monkeypatch.setattr(gate, "MAX_TURNED_AWAY", 4)
    front: Front = await make_front()
    unknown = status_pb2.Status(code=code_pb2.UNAUTHENTICATED).SerializeToString()
    one, two, three, four = (front.connect() for _ in range(4))
    calls = []
    for channel in (one, one, two, three, four):
        calls.append(asyncio.ensure_future(channel.unary_unary(STEP)(b"")))
        call = (await front.receive(link.CALL)).envelope.call
        await front.say(link.STATUS, call, unknown, amount=3_600_000_000)
    for calling, code in ((calls.pop(), "UNAUTHENTICATED"), (one.unary_unary(STEP)(b""), "RESOURCE_EXHAUSTED")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calling
        assert caught.value.code().name == code
    calling = asyncio.ensure_future(front.channel.unary_unary(STEP)(b""))
    call = (await front.receive(link.CALL)).envelope.call
    await front.say(link.MESSAGE, call, b"reply", flags=link.LAST)
    assert await calling == b"reply" and not any(call.done() for call in calls)
    for calling in calls:
        calling.cancel()


async def test_a_status_has_its_details_and_when_to_come_again(front: Front) -> None:
    calling = asyncio.ensure_future(front.channel.unary_unary(STEP)(b""))
    packet = await front.receive(link.CALL)
    assert packet.envelope.amount == 0
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="deltaline"))
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=250_000_000)))
    await front.say(link.STATUS, packet.envelope.call, status.SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calling
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert dict(caught.value.trailing_metadata() or ()) == {
        "grpc-status-details-bin": status.SerializeToString(),
        "grpc-retry-pushback-ms": "250",
    }


async def test_a_client_that_gives_up_ends_its_call_and_no_other(front: Front) -> None:
    kept = front.channel.stream_stream(STREAM)()
    await kept.write(b"1")
    first = await front.receive(link.CALL)
    calling = asyncio.ensure_future(front.channel.unary_unary(STEP)(b""))
    second = await front.receive(link.CALL)
    calling.cancel()
    assert (await front.receive(link.CANCEL)).envelope.call == second.envelope.call
    await kept.write(b"2")
    assert (await front.receive(link.MESSAGE)).envelope.call == first.envelope.call
    await front.say(link.MESSAGE, first.envelope.call, b"one")
    assert await kept.read() == b"one"
    await kept.done_writing()
    assert (await front.receive(link.MESSAGE)).envelope.flags == link.LAST | link.EMPTY
    await front.status(first.envelope.call)
    assert await kept.read() is grpc.aio.EOF and await kept.code() is grpc.StatusCode.OK


async def test_a_stream_is_read_as_fast_as_the_core_takes_it(front: Front) -> None:
    upload = front.channel.stream_unary(UPLOAD)()

    async def write() -> None:
        for _ in range(200):
            await upload.write(bytes(100_000))
        await upload.done_writing()

    writing = asyncio.create_task(write())
    call = (await front.receive(link.CALL)).envelope.call
    num_received = 1
    while num_received * 100_000 < forward.AHEAD_BYTES:
        await front.receive(link.MESSAGE)
        num_received += 1
    front.core.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):  # it says nothing more, whatever the client writes
        await front.receive(link.MESSAGE)
    front.core.socket.settimeout(TIMEOUT_S)
    await front.say(link.TAKEN, call, amount=num_received)
    for _ in range(200 - num_received):
        await front.receive(link.MESSAGE)
        await front.say(link.TAKEN, call, amount=1)
    assert (await front.receive(link.MESSAGE)).envelope.flags == link.LAST | link.EMPTY
    await front.say(link.MESSAGE, call, b"done", flags=link.LAST)
    assert await upload == b"done"
    await writing


@pytest.mark.parametrize("error", [ValueError, MemoryError])
@pytest.mark.parametrize("path", [UPLOAD, STREAM])
async def test_a_stream_that_can_not_be_sent_ends_as_any_call_that_fails(
    front: Front, monkeypatch: pytest.MonkeyPatch, path: str, error: type[Exception]
) -> None:
    aborted = list[bool]()

    def fail(self: Any, call: Any, body: bytes, *, is_last: bool) -> None:
        if body == b"2":
            raise error
        send(self, call, body, is_last=is_last)

    send = Conversation.send
    monkeypatch.setattr(Conversation, "send", fail)
    monkeypatch.setattr("os.abort", lambda: aborted.append(True))
    calling = front.channel.stream_stream(path)()
    await calling.write(b"1")
    call = (await front.receive(link.CALL)).envelope.call
    await calling.write(b"2")
    assert (await front.receive(link.CANCEL)).envelope.call == call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calling.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert aborted == [True] * (error is MemoryError)


async def test_the_core_is_told_what_of_a_stream_was_read(front: Front) -> None:
    stream = front.channel.stream_stream(STREAM)()
    await stream.write(b"")
    call = (await front.receive(link.CALL)).envelope.call
    body, total = bytes(100_000), 0
    while total < link.UNREAD_BYTES // 2:
        await front.say(link.MESSAGE, call, body)
        assert await stream.read() == body
        total += len(body)
    assert (await front.receive(link.TAKEN)).envelope.amount == total


async def test_replies_that_nobody_reads_are_dropped(
    make_front: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "HELD_BYTES", 20_000_000)
    front: Front = await make_front()
    read, unread = front.channel.stream_stream(STREAM)(), front.channel.stream_stream(STREAM)()
    await read.write(b"")
    modest = (await front.receive(link.CALL)).envelope.call
    await unread.write(b"")
    greedy = (await front.receive(link.CALL)).envelope.call
    body = bytes(100_000)
    await front.say(link.MESSAGE, modest, body)
    front.core.socket.settimeout(0.0)

    async def flood() -> int:
        """Send replies of the greedy one until a call is cancelled; which one."""
        while True:
            await asyncio.sleep(0)
            with suppress(BlockingIOError):
                front.core.socket.send(link.pack(link.MESSAGE, greedy) + body)
            with suppress(BlockingIOError):
                packet = link.read(memoryview(front.core.socket.recv(link.MAX_PACKET_BYTES)))
                if packet.kind == link.CANCEL:
                    return packet.call

    assert await asyncio.wait_for(flood(), 60) == greedy
    assert await read.read() == body
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await unread.read() is not grpc.aio.EOF:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_end_of_the_core_is_a_lost_answer(front: Front) -> None:
    calling = asyncio.ensure_future(front.channel.unary_unary(STEP)(b""))
    await front.receive(link.CALL)
    front.core.close()
    for call in (calling, front.channel.unary_unary(STEP)(b"")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_unknown_method_is_not_forwarded(front: Front) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.channel.unary_unary("/deltaline.v1.LayerService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
