"""Clients go on with sequences that are moved between servers, by themselves or by others, while they are stepped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.authority import Authority
from rigs.layer_calls import HeldEngine
from rigs.linked import Driven, tokens
from rigs.named_servers import Servers
from rigs.routers import free_port

from deltaline.v1.state_service_pb2 import MoveSequencesRequest
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_client import DeadlineExceeded, SequenceState, StateElsewhere, Tls

MIB = 1 << 20
NUM_MOVES = 24

pytestmark = pytest.mark.parametrize("device", ["cpu"])


@pytest.fixture
def peers(start: Callable[..., Servers], tmp_path: Path) -> Callable[..., Servers]:
    """A function that starts servers which may move sequences to each other."""

    def start_peers(num_servers: int, has_link: bool = False, **options: Any) -> Servers:
        ports = [free_port() for _ in range(num_servers)]
        options = {"host_state_bytes": 8 * MIB, "move_peers": ",".join(f"127.0.0.1:{p}" for p in ports)} | options
        links = [str(tmp_path / f"run{port}" / "link.sock") if has_link else "off" for port in ports]
        started = [start(1, port=port, link=link, **options) for port, link in zip(ports, links, strict=True)]
        return Servers([servers.servers[0] for servers in started])

    return start_peers


class Orchestrator:
    """Moves a sequence from server to server, and tells the client nothing.

    While it is running it does so in a thread, once for each time that it is let to.
    """

    def __init__(self, sequence: Any, targets: list[str]) -> None:
        self._home = sequence.server, sequence.server_epoch, sequence.handle
        self._targets = targets
        self._may_move = threading.Semaphore(0)
        self._is_over = False
        self.num_moves = 0

    def let_move(self) -> None:
        self._may_move.release()

    def move(self) -> None:
        server, epoch, handle = self._home
        target = self._targets[(self._targets.index(server) + 1) % len(self._targets)]
        id = self.num_moves.to_bytes(16, "little")
        request = MoveSequencesRequest(request_id=id, server_epoch=epoch, sequence=[handle], target=target)
        with grpc.insecure_channel(server) as channel:
            [moved] = StateServiceStub(channel).MoveSequences(request, timeout=60).moved
        self._home = moved.server, moved.server_epoch, moved.sequence
        self.num_moves += 1

    def _run(self) -> None:
        while self._may_move.acquire() and not self._is_over:
            self.move()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self.let_move()
            thread.join()


def stepped(driven: Driven, sequence: Any, turn: int) -> bytes:
    """What a sequence gives in a turn: one of each kind of steps, the longest as several."""
    do = driven.do
    kinds: list[Callable[[], Any]] = [
        lambda: sequence.decode(tokens(1, turn)),
        lambda: sequence.prefill(tokens(150, turn)),
        lambda: sequence.verify(tokens(4, turn)),
    ]
    output: bytes = do(kinds[turn % 3]()).tobytes()
    if turn % 3 == 2:
        do(sequence.commit(1 + turn % 4, now=turn % 2 == 0))
    return output


def test_a_sequence_is_stepped_while_it_is_moved_to_and_fro(
    driven: Driven, peers: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, peers(3, inline_limit_bytes=16 << 10)
    client = clients(servers.addresses[0], servers=servers.names)
    sequence, twin = do(client.open_many(2))
    orchestrator, seen, turn = Orchestrator(sequence, servers.names), set(), 0
    with orchestrator.running():
        while orchestrator.num_moves < NUM_MOVES:
            orchestrator.let_move()
            assert stepped(driven, sequence, turn) == stepped(driven, twin, turn)
            seen.add(sequence.server)
            turn += 1
    assert seen == set(servers.names) and not sequence.unfinished
    described, other = do(client.describe([sequence, twin]))
    assert described.spans == other.spans and twin.server == servers.names[0]
    [span], progress = described.spans, sequence.progress()
    assert (span.step, span.position) == (progress.step, progress.position)
    assert sum(servers.num_open) == 2
    assert do(client.close([sequence, twin])) == [SequenceState.CLOSED] * 2
    assert servers.num_open == [0, 0, 0]


def test_a_batch_whose_sequences_are_moved_apart_goes_on(
    driven: Driven, peers: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, peers(3)
    client = clients(servers.addresses[0], servers=servers.names)
    sequences, twins = do(client.open_many(12)), do(client.open_many(12))
    for turn in range(6):
        batch = np.concatenate([tokens(1, 12 * turn + row) for row in range(12)])
        outputs = do(client.decode(sequences, batch))
        # Rows share batches of other sizes now, which sum in another order.
        np.testing.assert_allclose(outputs, do(client.decode(twins, batch)), rtol=1e-4, atol=1e-5)
        target = servers.names[(turn + 1) % 3]
        do(client.move([one for one in sequences[turn::3] if one.server != target], target))
    assert len({one.server for one in sequences}) == 3
    assert do(client.close(sequences + twins)) == [SequenceState.CLOSED] * 24
    assert servers.num_open == [0, 0, 0]


def test_what_is_asked_of_a_moved_sequence_is_done_by_its_owner(
    driven: Driven, peers: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, peers(2)
    client = clients(servers.addresses[0], servers=servers.names)
    sequence, twin = do(client.open_many(2))
    for one in (sequence, twin):
        do(one.prefill(tokens(20)))
    orchestrator = Orchestrator(sequence, servers.names)
    calls: list[Callable[[Any], Any]] = [
        lambda one: do(client.renew([one])),
        lambda one: do(client.describe([one]))[0].spans,
        lambda one: gone_on(do(one.fork(2))),
        lambda one: gone_on(do(do(one.snapshot()).restore())),
        lambda one: gone_on([do(client.open(snapshot=do(one.snapshot())))]),
        lambda one: gone_on([do(client.load_sequence(do(one.export())))]),
        lambda one: do(one.decode(tokens(1, 7))).tobytes(),
        lambda one: do(client.close([one])),
    ]

    def gone_on(children: list[Any]) -> list[Any]:
        outputs = [do(child.decode(tokens(1, 3))).tobytes() for child in children]
        return [*outputs, do(client.close(children))]

    for call in calls:
        orchestrator.move()
        assert call(sequence) == call(twin)
    assert orchestrator.num_moves == len(calls)
    assert servers.num_open == [0, 0]


def test_a_client_that_may_not_follow_is_told_the_owner(
    driven: Driven, peers: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, peers(2)
    client = clients(servers.addresses[0])
    sequence = do(client.open())
    Orchestrator(sequence, servers.names).move()
    with pytest.raises(StateElsewhere, match=f"lives at {servers.names[1]}, where this client may not go") as raised:
        do(sequence.decode(tokens(1)))
    error = raised.value
    assert error.server == servers.names[1] and servers.num_open == [0, 1]
    [moved] = do(client.move([sequence], servers.names[1]))  # it had been, and now the client may go there
    assert (error.server, error.server_epoch, error.handle) == moved[1:]
    do(sequence.decode(tokens(1)))
    assert sequence.server == servers.names[1]


def test_with_tls_an_owner_is_followed_where_it_proves_its_name(
    driven: Driven, peers: Callable[..., Servers], clients: Callable[..., Any], tmp_path: Path
) -> None:
    do, authority = driven.do, Authority(tmp_path)
    pair = authority.issue("server")
    servers = peers(2, tls_cert=str(pair.cert), tls_key=str(pair.key), move_ca=str(authority.ca))
    client = clients(servers.addresses[0], tls=Tls(authority.ca))
    sequence, twin = do(client.open_many(2))
    for turn in range(6):
        assert stepped(driven, sequence, turn) == stepped(driven, twin, turn)
        do(client.move([sequence], servers.names[1 - turn % 2]))
        assert servers.num_open == [1 + turn % 2, 1 - turn % 2]


@pytest.mark.parametrize("by", ["link", "shared memory"])
def test_tensors_that_lay_in_memory_of_the_old_server_reach_the_owner(
    driven: Driven, peers: Callable[..., Servers], clients: Callable[..., Any], by: str
) -> None:
    do, options = driven.do, {"has_link": True} if by == "link" else {"shared_memory_bytes": 4 * MIB}
    servers = peers(2, inline_limit_bytes=256 << 10, **options)
    memory = {} if by == "link" else {"shared_memory_bytes": 4 * MIB}
    client = clients(servers.addresses[0], servers=servers.names, **memory)
    sequence, twin = do(client.open_many(2))
    assert do(client.info()).is_linked == (by == "link")
    orchestrator = Orchestrator(sequence, servers.names)
    for turn in range(4):
        for count in (1200, 900, 1200):  # the larger is more than a message has room for
            outputs = [do(one.prefill(tokens(count, turn))).tobytes() for one in (sequence, twin)]
            assert outputs[0] == outputs[1]
        orchestrator.move()
    assert sequence.server == servers.names[1] and servers.num_open == [2, 0]
    registries, why = [one.metrics.registry for one in servers.servers], {"reason": "INVALID_SHARED_MEMORY"}
    assert not any(one.get_sample_value("deltaline_refused_total", why) for one in registries)


@pytest.mark.parametrize("has_link", [False, True])
def test_a_step_that_goes_in_no_message_is_sent_again_in_memory_of_the_owner(
    driven: Driven,
    peers: Callable[..., Servers],
    clients: Callable[..., Any],
    has_link: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    do, servers = driven.do, peers(2, has_link, inline_limit_bytes=256 << 10, shared_memory_bytes=4 * MIB)
    client = clients(servers.addresses[0], servers=servers.names, shared_memory_bytes=4 * MIB)
    sequence, twin = do(client.open_many(2))
    expected = do(twin.prefill(tokens(1200)))
    held = HeldEngine(servers.servers[0], monkeypatch)
    with pytest.raises(DeadlineExceeded):
        do(sequence.prefill(tokens(1200), timeout_s=2.0))
    held.loop.call_soon_threadsafe(held.release)
    Orchestrator(sequence, servers.names).move()
    assert sequence.unfinished and servers.num_open == [1, 1]
    np.testing.assert_array_equal(do(sequence.resume()), expected)
    [described] = do(client.describe([sequence]))
    assert (described.spans[0].step, described.spans[0].position) == (1, 1200)
    assert sequence.server == servers.names[1]
