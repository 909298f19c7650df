"""Both clients over the local link: found by themselves or named, the same results as by gRPC, whatever breaks."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.link_proxy import LinkProxy
from rigs.linked import FAST, HIDDEN, Driven, by_link, hidden_link, tokens
from rigs.served import served
from rigs.shared_memory import lies_in_shared_memory
from rigs.until import until

from deltaline import link
from deltaline.v1.admin_service_pb2 import GetServerInfoRequest
from deltaline_cli import health, main
from deltaline_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Disconnected,
    InvalidAdapter,
    MessageTooLarge,
    Retry,
    StateLost,
    Unavailable,
)
from deltaline_client._transport.async_transport import AsyncTransport
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.flow import Call, TakeMemory
from deltaline_client._transport.flow import Server as Named
from deltaline_client._transport.link.connect import Where, connect
from deltaline_client._transport.methods import INFO
from deltaline_client._transport.transport import Transport
from deltaline_server.app import Server
from deltaline_server.front.link.call import Call as ServerCall
from deltaline_server.front.steps import stepping
from deltaline_server.memory.mappings import Mappings


def run_some(driven: Driven, client: Any) -> list[Any]:
    """Prefill (a large one too), decode and verify; the outputs."""
    do = driven.do
    first, second = do(client.open_many(2))
    outputs = [do(first.prefill(tokens(1500, 1))), do(second.prefill(tokens(3, 2)))]
    outputs += [do(client.decode([first, second], tokens(2, seed))) for seed in (3, 4)]
    outputs.append(do(first.verify(tokens(3, 5))))
    do(first.commit(2))
    outputs.append(do(first.decode(tokens(1, 6))))
    do(client.close([first, second]))
    return outputs


@pytest.mark.parametrize("scheme", ["link", "found"])
def test_results_are_those_by_grpc(driven: Driven, linked: Server, scheme: str) -> None:
    address = f"link:{linked.link.path}" if scheme == "link" else linked.address
    client = driven.make(address)
    outputs = run_some(driven, client)
    assert driven.do(client.info()).is_linked is True
    assert by_link(linked) == 1
    driven.do(client.disconnect())
    linked.runtime.table.check_integrity()
    path, plain = hidden_link(linked), driven.make(linked.address)
    expected = run_some(driven, plain)
    assert driven.do(plain.info()).is_linked is False
    driven.do(plain.disconnect())
    path.with_name("hidden.sock").rename(path)
    for mine, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_steps_over_links_that_break_are_applied_once(driven: Driven, linked: Server, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    num_steps, lives = 40, itertools.chain(range(3, 30, 2), [60, 90])
    with LinkProxy(tmp_path, linked.link.path, lives) as proxy:
        client = driven.make(f"link:{proxy.path}", retry=FAST)
        sequence = driven.do(client.open())
        outputs = [driven.do(sequence.prefill(tokens(700, 1)))]
        outputs += [driven.do(sequence.decode(tokens(1, seed))) for seed in range(num_steps)]
        assert driven.do(client.describe([sequence]))[0].spans[0].position == 700 + num_steps
        driven.do(client.disconnect())
        assert proxy.kills >= 5
    calm = driven.make(f"link:{linked.link.path}")
    undisturbed = driven.do(calm.open())
    expected = [driven.do(undisturbed.prefill(tokens(700, 1)))]
    expected += [driven.do(undisturbed.decode(tokens(1, seed))) for seed in range(num_steps)]
    driven.do(calm.disconnect())
    for mine, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    linked.runtime.table.check_integrity()


def test_a_message_that_no_server_takes_is_refused_at_once(driven: Driven, linked: Server) -> None:
    client = driven.make(f"link:{linked.link.path}")
    most = linked.config.inline_limit_bytes + (1 << 20)
    for size in (most + 1, 4 * most):
        with pytest.raises(MessageTooLarge, match=f"expected a message of at most {most} bytes, got "):
            driven.do(client.adapters.load("large", config=bytes(size), tensors=b"x", timeout_s=10.0))
    assert by_link(linked) == 1
    driven.do(client.disconnect())


def test_a_stream_outlives_its_window(driven: Driven, linked: Server) -> None:
    client = driven.make(f"link:{linked.link.path}", timeout=60.0)
    sequence = driven.do(client.open())
    for seed in range(2 * link.STREAM_MESSAGES + 1):
        driven.do(sequence.decode(tokens(1, seed)))
    assert by_link(linked) == 1
    driven.do(client.disconnect())


async def test_steps_that_wait_to_be_taken_leave_replies_their_room(
    make_server: Callable[..., Server], link_option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes a step at a time, and more of them are sent than link memory has room for."""
    monkeypatch.setattr(stepping, "STREAM_BYTES", 1)
    monkeypatch.setattr(link, "REPLY_BYTES", 1 << 20)
    num_tokens = 1024
    async with (
        make_server(link=link_option, inline_limit_bytes=num_tokens * HIDDEN * 4),
        AsyncClient(f"link:{link_option}") as client,
        asyncio.timeout(60),
    ):
        sequences, prompt = await client.open_many(4), tokens(4 * num_tokens)
        outputs = await asyncio.gather(*(one.prefill(prompt, output="all") for one in sequences))
    for output in outputs:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-4, atol=1e-5)


def test_an_upload_goes_by_the_link(driven: Driven, linked: Server) -> None:
    client = driven.make(f"link:{linked.link.path}")
    sent, size = list[int](), 24 << 20  # more than twice the memory that its chunks take turns in
    with pytest.raises(InvalidAdapter):
        driven.do(
            client.adapters.load(
                "odd", config=b"{}", tensors=bytes(size), progress=lambda count, total: sent.append(count)
            )
        )
    assert sent[-1] == size
    driven.do(client.disconnect())


def test_an_upload_that_is_interrupted_is_over_on_the_server(linked: Server) -> None:
    client = Client(f"link:{linked.link.path}")

    def interrupt(count: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.adapters.load("odd", config=b"{}", tensors=bytes(24 << 20), progress=interrupt)
    labels = {"grpc_type": "client_stream", "grpc_service": "deltaline.v1.AdapterService", "grpc_method": "LoadAdapter"}
    get = linked.metrics.registry.get_sample_value
    asyncio.run(until(lambda: get("grpc_server_handled_total", labels | {"grpc_code": "Canceled"}), 10.0))
    assert client.info().is_linked and by_link(linked) == 1
    client.disconnect()


def test_tensors_lie_in_link_memory_where_the_client_asks_for_it(driven: Driven, linked: Server) -> None:
    client = driven.make(linked.address, shared_memory_bytes=1 << 20)  # the server has --shared-memory-bytes 0
    sequence = driven.do(client.open())
    driven.do(client.info())
    array = driven.do(client.empty((5, HIDDEN)))
    array[:] = tokens(5, 1)
    assert lies_in_shared_memory(array)
    outputs = driven.do(sequence.prefill(array, copy=False))
    assert lies_in_shared_memory(outputs)
    assert linked.metrics.registry.get_sample_value("deltaline_link_memory_bytes") == 1 << 20
    again = driven.do(client.open())
    np.testing.assert_array_equal(driven.do(again.prefill(tokens(5, 1))), outputs)
    del array, outputs
    driven.do(client.disconnect())


@pytest.fixture
def memory(linked: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, Callable[[float], TakeMemory]]:
    """What lets the server make memory, and how a client asks for it and waits so many seconds."""
    may_make, make, server = threading.Event(), Mappings.make, Named(linked.runtime.table.server_epoch, "")

    def make_late(mappings: Mappings, size: int) -> Any:
        may_make.wait(60)
        return make(mappings, size)

    monkeypatch.setattr(Mappings, "make", make_late)
    return may_make, lambda timeout_s: TakeMemory(server, 1 << 20, timeout_s)


def test_memory_that_comes_late_is_for_who_asks_next(linked: Server, memory: Any) -> None:
    may_make, asking = memory
    transport = Transport(f"link:{linked.link.path}")
    session = transport.session()
    with pytest.raises(DeadlineExceeded):
        session.memory(asking(0.0))
    may_make.set()
    regions = [session.memory(asking(60.0)) for _ in range(2)]
    assert linked.runtime.link_regions.used_bytes == 2 << 20
    assert len({region.number for region in regions if region}) == 2
    session.close()
    transport.close()


async def test_memory_that_comes_late_is_for_the_task_that_asks_next(linked: Server, memory: Any) -> None:
    may_make, asking = memory
    transport = AsyncTransport(f"link:{linked.link.path}")
    session = await transport.session()
    cancelled = asyncio.create_task(session.memory(asking(60.0)))
    await asyncio.sleep(0)  # it asks
    cancelled.cancel()
    await asyncio.wait([cancelled])
    with pytest.raises(DeadlineExceeded):
        await session.memory(asking(0.0))
    may_make.set()
    regions = [await session.memory(asking(60.0)) for _ in range(2)]
    assert linked.runtime.link_regions.used_bytes == 2 << 20
    assert len({region.number for region in regions if region}) == 2
    session.close()
    await transport.close()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            lambda path, server: Where(path, 4_242, server.runtime.table.server_epoch),
            "of the user 4242 on this link, got",
        ),
        (lambda path, server: Where(path, None, 17), "another server listens on this link"),
        (lambda path, server: Where(path + "x"), "no server answers on the local link"),
    ],
)
def test_a_link_to_another_server_is_not_taken(linked: Server, where: Callable[..., Where], words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        connect(where(linked.link.path, linked))


def test_a_call_of_another_thread_ends_with_the_disconnect(linked: Server) -> None:
    client = Client(f"link:{linked.link.path}")
    with ThreadPoolExecutor(4) as threads:
        sequences = client.open_many(4)
        is_going = threading.Event()

        def decode(sequence: Any) -> None:
            while True:
                sequence.decode(tokens(1))
                is_going.set()

        calls = [threads.submit(decode, sequence) for sequence in sequences]
        assert is_going.wait(60)
        client.disconnect()
        for call in calls:
            with pytest.raises(Disconnected):
                call.result(60)


def test_threads_have_a_connection_each_and_share_them(linked: Server) -> None:
    with Client(f"link:{linked.link.path}") as client, ThreadPoolExecutor(4) as threads:
        sequences = client.open_many(8)
        barrier = threading.Barrier(4, timeout=60)

        def decode(sequence: Any) -> Any:
            barrier.wait()
            return sequence.decode(tokens(1))

        outputs = list(threads.map(decode, sequences))
        for output in outputs:  # batches differ in their rows, and so may the last bit
            np.testing.assert_allclose(output, outputs[0], rtol=1e-4, atol=1e-5)
        assert 1 <= by_link(linked) <= 4


def test_a_server_that_restarts_costs_its_idle_connections_one_attempt(
    make_server: Callable[..., Server], link_option: str
) -> None:
    transport, ask = Transport(f"link:{link_option}"), Call(INFO, GetServerInfoRequest(), 60.0)
    with served(make_server(link=link_option)):
        for session in [transport.session() for _ in range(4)]:
            session.close()
    with served(make_server(link=link_option)):
        broken = transport.session()
        with pytest.raises(Unavailable):
            broken.call(ask)
        broken.close()
        again = transport.session()
        assert again.call(ask).server_epoch
        again.close()
    transport.close()


def test_a_forked_process_is_told_to_make_its_own_client(
    driven: Driven, linked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = driven.make(f"link:{linked.link.path}")
    sequence = driven.do(client.open())
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        for call in (lambda: sequence.decode(tokens(1)), client.disconnect):
            with pytest.raises(RuntimeError, match="before the process forked: make another"):
                driven.do(call())
    assert driven.do(sequence.decode(tokens(1))).shape == (1, HIDDEN)
    assert by_link(linked) == 1  # the same connection
    driven.do(client.disconnect())


def test_tensors_beyond_a_packet_lie_in_link_memory_by_themselves(driven: Driven, linked: Server) -> None:
    client = driven.make(f"link:{linked.link.path}")
    regions = linked.runtime.link_regions
    small, first, second = driven.do(client.open_many(3))
    driven.do(small.prefill(tokens(100, 1)))
    assert regions.used_bytes == 0
    outputs = [driven.do(one.prefill(tokens(500, 2))) for one in (first, second)]
    np.testing.assert_array_equal(*outputs)  # the one in messages, the other where the first has led to
    placed = regions.used_bytes
    assert placed >= 4 * linked.config.inline_limit_bytes
    driven.do(first.prefill(tokens(600, 3)))
    assert regions.used_bytes == placed
    driven.do(client.disconnect())


def test_commands_go_by_the_link_too(linked: Server, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"link:{linked.link.path}"
    assert health.main([address]) == 0 == health.main([address, "--liveness"])
    assert health.main([address + "x"]) == 1
    assert main.main(["info", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"{address}: SERVING",
        f"{address}: SERVING",
        f"{address}x: UNAVAILABLE: [Errno 2] No such file or directory",
    ]
    assert "calls go by     the local link" in lines


def test_a_server_that_took_another_s_place_has_lost_its_state(
    driven: Driven, make_server: Callable[..., Server], link_option: str
) -> None:
    client = driven.make(f"link:{link_option}", retry=FAST)
    with served(make_server(link=link_option)):
        sequence = driven.do(client.open())
        driven.do(sequence.decode(tokens(1)))
    with served(make_server(link=link_option)):
        with pytest.raises(StateLost):
            driven.do(sequence.decode(tokens(1)))
        assert driven.do(driven.do(client.open()).decode(tokens(1))).shape == (1, HIDDEN)
    driven.do(client.disconnect())


def test_a_call_whose_time_is_over_is_cancelled(driven: Driven, linked: Server) -> None:
    client = driven.make(f"link:{linked.link.path}", timeout=1e-9, retry=Retry(max_attempts=1))
    with pytest.raises(DeadlineExceeded):
        driven.do(client.info())
    driven.do(client.disconnect())
    patient = driven.make(f"link:{linked.link.path}", timeout=1e9)
    assert driven.do(patient.info()).is_linked
    driven.do(patient.disconnect())


def test_a_trace_goes_with_its_calls(driven: Driven, linked: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    monkeypatch.setattr(Caller, "metadata", lambda caller, server=None: (("traceparent", traceparent),))
    invocation_metadata = ServerCall.invocation_metadata

    def peer(call: ServerCall) -> str:
        seen.append(invocation_metadata(call))
        return "peer"

    monkeypatch.setattr(ServerCall, "peer", peer)
    client = driven.make(f"link:{linked.link.path}")
    driven.do(driven.do(client.open()).decode(tokens(1)))
    driven.do(client.disconnect())
    assert (("traceparent", traceparent),) in seen
