"""The examples of deploy/routing while a server joins and one leaves under load: nothing is lost or done twice."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.linked import FAST, tokens
from rigs.named_servers import Servers
from rigs.routers import BY_AFFINITY, BY_NAME, BY_SESSION, OPTIONS, routed

from deltaline.v1.layer_service_pb2 import CloseSequencesRequest, OpenSequencesRequest, RenewLeasesRequest
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline_client import Client, Draining, Row, Sequence, SequenceState
from deltaline_server.app import Server

NUM_CLIENTS, SEQUENCES_EACH, STEPS, STEPS_A_ROUND = 100, 20, 20, 5
INPUTS = [tokens(3, 0), *(tokens(1, step) for step in range(1, STEPS))]
JOIN_AT, LEAVE_AT, NUM_ROUNDS = 6, 12, SEQUENCES_EACH + STEPS // STEPS_A_ROUND - 1
WORKERS = 8


@dataclass
class Run:
    """A sequence and its outputs. was_followed: it was stepped while its client's opens were brought elsewhere."""

    sequence: Sequence
    outputs: list[Any] = field(default_factory=list)
    was_followed: bool = False

    def row(self) -> Row:
        hidden = INPUTS[len(self.outputs)]
        return Row.decode(self.sequence, hidden) if self.outputs else Row.prefill(self.sequence, hidden)


@dataclass
class Caller:
    """A client, what it has under way, and what is done. num_refused: opens that came to a server that drains."""

    client: Client
    runs: list[Run] = field(default_factory=list)
    done: list[Run] = field(default_factory=list)
    num_refused: int = 0

    def open(self) -> Run:
        """Open a sequence, again and again until the router knows who drains."""
        while True:
            try:
                return Run(self.client.open())
            except Draining:
                self.num_refused += 1
                time.sleep(0.1)

    def round(self) -> None:
        """Open one more, until it has had all; step all some times, in one batch, and close those that are done."""
        if len(self.runs) + len(self.done) < SEQUENCES_EACH:
            self.runs.append(self.open())
        brought = self.runs[-1].sequence.server
        for _ in range(STEPS_A_ROUND):
            outputs = self.client.step([run.row() for run in self.runs]).outputs
            for run, output in zip(self.runs, outputs, strict=True):
                run.outputs.append(output)
                run.was_followed |= run.sequence.server != brought
        done = [run for run in self.runs if len(run.outputs) == STEPS]
        if done:
            assert self.client.close([run.sequence for run in done]) == [SequenceState.CLOSED] * len(done)
            self.runs = [run for run in self.runs if run not in done]
            self.done += done


def executed(server: Server) -> float:
    """How many rows a server ran, so far."""
    return server.metrics.registry.get_sample_value("deltaline_steps_total", {"outcome": "executed"}) or 0.0


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_lost_and_no_step_done_twice(start: Callable[..., Servers], tmp_path: Path, name: str) -> None:
    servers = start(4, max_sequences=512)
    leaving, joining = servers.addresses[0], servers.addresses[3]
    with Client(joining) as client, client.open() as sequence:
        expected = [sequence.prefill(INPUTS[0]), *(sequence.decode(hidden) for hidden in INPUTS[1:])]
    before, begin_s = [executed(server) for server in servers.servers], time.perf_counter()
    with ExitStack() as stack:
        router = stack.enter_context(routed(name, tmp_path, servers.addresses[:3], BY_AFFINITY))
        made = [Client(router.address, servers=servers.names, retry=FAST) for _ in range(NUM_CLIENTS)]
        callers = [Caller(stack.enter_context(client)) for client in made]
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        for number in range(NUM_ROUNDS):
            under_way = [pool.submit(caller.round) for caller in callers]
            under_way[NUM_CLIENTS // 4].result()
            if number == JOIN_AT:
                router.lead_to(servers.addresses)
            if number == LEAVE_AT:
                assert executed(servers.servers[3]) > before[3], "nothing was brought to the one that joined"
                if name == "nginx":  # it does not ask for readiness
                    router.lead_to(servers.addresses[1:])
                with Client(leaving) as client:
                    client.drain(600.0)
            for one in under_way:
                one.result()
        took_s, runs = time.perf_counter() - begin_s, [run for caller in callers for run in caller.done]
        assert servers.num_open == [0] * 4
        shares = [executed(server) - past for server, past in zip(servers.servers, before, strict=True)]
    assert len(runs) == NUM_CLIENTS * SEQUENCES_EACH and sum(shares) == len(runs) * STEPS and min(shares) > 0
    for run in runs:
        assert all(np.allclose(ours, own, atol=1e-5) for ours, own in zip(run.outputs, expected, strict=True))
    followed, refused = sum(run.was_followed for run in runs), sum(caller.num_refused for caller in callers)
    assert followed > 0
    while listens(leaving):  # its drain is over, since nothing of it is open
        time.sleep(0.1)
    print(f"{name}: {len(runs)} sequences, {shares} steps by server, {followed} sequences followed by address")
    print(f"{refused} opens told DRAINING, {took_s:.1f} s, load {os.getloadavg()[0]:.1f}")


@pytest.mark.parametrize("device", ["cpu"])
def test_envoy_brings_calls_to_the_server_that_they_name_also_while_it_drains(
    start: Callable[..., Servers], tmp_path: Path
) -> None:
    """The client follows no name by itself; calls that name no server go in turns."""
    servers = start(3)
    with ExitStack() as stack:
        router = stack.enter_context(routed("envoy", tmp_path, servers.addresses, BY_NAME))
        client = stack.enter_context(Client(router.address, retry=FAST))
        sequences = [client.open() for _ in range(6)]
        assert {one.server for one in sequences} == set(servers.names)
        with Client(servers.addresses[0]) as direct:
            direct.drain(600.0)
        while servers.names[0] in (seen := [try_to_open(client) for _ in range(3)]) or "" in seen:
            time.sleep(0.2)
        client.decode(sequences, tokens(6))
        assert client.renew(sequences) == [SequenceState.OPEN] * 6
        client.decode(sequences, tokens(6))
        assert client.close(sequences) == [SequenceState.CLOSED] * 6
        assert servers.num_open == [0] * 3


@pytest.mark.parametrize("device", ["cpu"])
def test_envoy_brings_who_sends_its_session_back_to_one_server_also_while_it_drains(
    start: Callable[..., Servers], tmp_path: Path
) -> None:
    """The caller knows nothing of servers and sends no affinity; calls without a session go in turns."""
    servers = start(3)
    with ExitStack() as stack:
        router = stack.enter_context(routed("envoy", tmp_path, servers.addresses, BY_SESSION))
        stub: Any = LayerServiceStub(stack.enter_context(grpc.insecure_channel(router.address)))
        opens = [stub.OpenSequences.with_call(OpenSequencesRequest(count=1), wait_for_ready=True) for _ in range(6)]
        assert servers.num_open == [2] * 3
        named = [
            ({"server_epoch": opened.server_epoch, "sequence": opened.sequence}, session_of(call))
            for opened, call in opens
        ]
        with Client(servers.addresses[0]) as direct:
            direct.drain(600.0)
        client = stack.enter_context(Client(router.address, servers=servers.names, retry=FAST))
        while "" in [try_to_open(client) for _ in range(3)]:
            time.sleep(0.2)
        for names, session in named * 3:
            assert list(stub.RenewLeases(RenewLeasesRequest(**names), metadata=session).state) == [SequenceState.OPEN]
        anywhere = [stub.RenewLeases(RenewLeasesRequest(**named[0][0])).state[0] for _ in range(6)]
        assert set(anywhere) != {SequenceState.OPEN}
        for names, session in named:
            stub.CloseSequences(CloseSequencesRequest(**names), metadata=session)
        assert servers.num_open == [0] * 3


def session_of(call: Any) -> list[tuple[str, str]]:
    """What Envoy gave the caller to send back."""
    return [(key, value) for key, value in call.initial_metadata() if key == "deltaline-session"]


def try_to_open(client: Client) -> str:
    """The server that takes a sequence; empty where it is one that drains."""
    try:
        with client.open() as sequence:
            return sequence.server
    except Draining:
        return ""
