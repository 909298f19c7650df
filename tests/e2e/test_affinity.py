"""Several servers behind one address: each call finds the one that it means, or says that it did not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.balancer import NONE, balanced, by_affinity, by_name, round_robin
from rigs.link_proxy import LinkProxy
from rigs.linked import Driven, hidden_link, tokens
from rigs.named_servers import Servers, run_round
from rigs.served import served

from deltaline_client import SequenceState, SnapshotState, StateElsewhere, StateLost, Waypoints
from deltaline_server.app import Server
from deltaline_server.front import requests

pytestmark = pytest.mark.parametrize("device", ["cpu"])

NUM_SERVERS = 3


def test_behind_a_round_robin_clients_follow_the_names_and_nothing_is_lost_or_left_open(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    servers = start(NUM_SERVERS)
    with balanced(servers.addresses, round_robin(NUM_SERVERS)) as balancer:
        client = clients(balancer.address, servers=servers.names)
        outputs = [run_round(driven, client) for _ in range(12)]
        assert all(np.array_equal(one, outputs[0]) for one in outputs)
        assert servers.num_open == [0] * NUM_SERVERS
        assert balancer.servers_of("OpenSequences") == set(range(NUM_SERVERS))
        assert not balancer.servers_of("StepStream") | balancer.servers_of("CloseSequences")


@pytest.mark.parametrize("channels", [1, 3])
def test_a_policy_that_hashes_the_affinity_brings_all_of_a_client_to_one_server(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any], channels: int
) -> None:
    servers = start(NUM_SERVERS)
    with balanced(servers.addresses, by_affinity(NUM_SERVERS)) as balancer:
        seen: dict[str, set[int]] = {}
        for _ in range(6):
            client, before = clients(balancer.address, channels=channels), len(balancer.routed)
            run_round(driven, client)
            run_round(driven, client)
            own = balancer.routed[before:]
            assert {"OpenSequences", "StepStream"} <= {routed.method.rpartition("/")[2] for routed in own}
            [affinity] = {routed.metadata["deltaline-affinity"] for routed in own}
            seen[affinity] = {routed.server for routed in own}
        assert len(seen) == 6 and all(len(reached) == 1 for reached in seen.values())
        assert servers.num_open == [0] * NUM_SERVERS


def test_who_may_not_follow_is_told_elsewhere_and_never_lost(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, start(2)
    with balanced(servers.addresses, lambda metadata: int("deltaline-server" in metadata)) as balancer:
        client = clients(balancer.address)
        sequence = do(client.open())
        do(client.info())
        wrong_calls: list[Callable[[], Any]] = [
            lambda: sequence.decode(tokens(1)),
            lambda: client.describe([sequence]),
            lambda: client.renew([sequence]),
            lambda: sequence.fork(),
            lambda: sequence.snapshot(),
            lambda: sequence.close(),
        ]
        for wrong in wrong_calls:
            with pytest.raises(StateElsewhere):
                do(wrong())
        assert servers.num_open == [1, 0] and not sequence.unfinished
        balancer.policy = lambda metadata: 0
        assert do(client.close([sequence])) == [SequenceState.CLOSED]


def test_where_the_name_can_not_be_reached_calls_go_to_the_given_address(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    names = ["127.0.0.1:1", "127.0.0.1:2"]  # nobody listens there
    servers = [start(1, advertise=name).servers[0] for name in names]
    with balanced([server.address for server in servers], by_name(names)) as balancer:
        client = clients(balancer.address, servers=names)
        for _ in range(4):
            run_round(driven, client)
        assert balancer.servers_of("StepStream") == {0, 1}
        assert [server.runtime.table.num_open for server in servers] == [0, 0]


def test_two_ways_of_which_none_leads_there_are_tried_in_turn_until_one_does(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    """The named address is not reached, and the given one leads elsewhere, until it does not."""
    do, servers = driven.do, start(2, advertise="127.0.0.1:1")
    servers.servers[1].identity.name = "127.0.0.1:2"
    tries: list[int] = []

    def policy(metadata: Any) -> int:
        if metadata.get("deltaline-server") is None:
            return 0
        tries.append(1)
        return int(len(tries) < 3)

    with balanced(servers.addresses, policy) as balancer:
        client = clients(balancer.address, servers=["127.0.0.1:1"])
        sequence = do(client.open())
        assert do(client.describe([sequence]))[0].state is SequenceState.OPEN
        assert len(tries) == 3
        tries.clear()  # so that a stream, too, is brought to another server at first
        do(sequence.decode(tokens(1)))
        assert len(tries) == 3 and sequence.position == 1
        assert do(client.close([sequence])) == [SequenceState.CLOSED]


def test_a_name_that_answered_and_fails_is_tried_once_more_before_the_given_address(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers, fails = driven.do, start(1), [False]

    def policy(metadata: Any) -> int:
        return NONE if fails and fails.pop() else 0

    with balanced(servers.addresses, policy) as named, balanced(servers.addresses, round_robin(1)) as balancer:
        servers.servers[0].identity.name = named.address
        client = clients(balancer.address, servers=[named.address])
        sequences = do(client.open_many(2))
        fails.clear()
        do(client.describe(sequences))  # it has answered by its name
        for fails[:], way in (([True], named), ([True, True], balancer)):
            named.routed.clear()
            balancer.routed.clear()
            do(client.describe(sequences))
            assert named.servers_of("DescribeSequences") == ({NONE, 0} if way is named else {NONE})
            assert balancer.servers_of("DescribeSequences") == (set() if way is named else {0})
            for one in sequences:
                do(one.decode(tokens(1)))
            assert way.servers_of("StepStream") == {0}
        do(client.close(sequences))


def test_servers_join_and_leave_while_clients_go_on(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    """What a policy remaps then is followed by name: nothing is lost, and nothing is left open."""
    do, servers, live = driven.do, start(4), [0, 1, 2]
    with balanced(servers.addresses, lambda metadata: live[by_affinity(len(live))(metadata)]) as balancer:
        made = [clients(balancer.address, servers=servers.names) for _ in range(10)]
        held: list[list[Any]] = [do(client.open_many(2)) for client in made]
        spread = 0
        for turn in range(6):
            if turn == 1:
                live.append(3)
            if turn == 3:
                live.remove(0)
                do(clients(servers.addresses[0]).drain(600.0))
            for client, sequences in zip(made, held, strict=True):
                sequences.append(do(client.open()))
                do(client.decode(sequences, tokens(len(sequences), turn)))
                spread += len({one.server for one in sequences}) > 1
                assert do(client.close([sequences.pop(0)])) == [SequenceState.CLOSED]
        assert [[one.position for one in sequences] for sequences in held] == [[2, 1]] * len(made)
        for client, sequences in zip(made, held, strict=True):
            assert do(client.close(sequences)) == [SequenceState.CLOSED] * 2
    assert spread > 0 and servers.num_open == [0] * 4


def test_one_call_steps_sequences_of_several_servers(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, start(NUM_SERVERS)
    with balanced(servers.addresses, round_robin(NUM_SERVERS)) as balancer:
        client = clients(balancer.address, servers=servers.names)
        sequences = [do(client.open()) for _ in range(2 * NUM_SERVERS)]
        assert {one.server for one in sequences} == set(servers.names)
        for seed in range(3):
            outputs = do(client.decode(sequences, np.repeat(tokens(1, seed), len(sequences), axis=0)))
            assert all(np.array_equal(row, outputs[0]) for row in outputs)
        assert [one.position for one in sequences] == [3] * len(sequences)
        assert do(client.close(sequences)) == [SequenceState.CLOSED] * len(sequences)
        assert servers.num_open == [0] * NUM_SERVERS


def test_what_is_made_of_a_sequence_is_found_where_it_was_made(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, start(NUM_SERVERS)
    with balanced(servers.addresses, round_robin(NUM_SERVERS)) as balancer:
        client = clients(balancer.address, servers=servers.names)
        sequence = do(client.open())
        do(sequence.prefill(tokens(64, 1), waypoints=Waypoints(at_end=True)))
        children = do(sequence.fork(2))
        snapshot = do(sequence.snapshot())
        others = [*do(snapshot.restore(2)), do(client.open(snapshot=snapshot))]
        assert {one.server for one in (*children, *others)} == {sequence.server}
        family = [sequence, *children, *others]
        outputs = do(client.decode(family, np.repeat(tokens(1, 2), len(family), axis=0)))
        assert all(np.array_equal(row, outputs[0]) for row in outputs)
        do(snapshot.renew())
        do(snapshot.release())
        do(client.close(family))
        assert servers.num_open == [0] * NUM_SERVERS
        assert all(server.runtime.states.snapshots.num_held <= 1 for server in servers.servers)


def test_what_is_loaded_or_listed_is_found_where_it_is(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    do, servers = driven.do, start(NUM_SERVERS, host_state_bytes=8 << 20)
    monkeypatch.setattr(requests, "MAX_SNAPSHOTS", 1)  # of a page
    with balanced(servers.addresses, round_robin(NUM_SERVERS)) as balancer:
        client = clients(balancer.address, servers=servers.names)
        sequence = do(client.open())
        do(sequence.prefill(tokens(64, 1)))
        content = do(do(sequence.snapshot()).export())
        loaded = [do(client.snapshots.load(content)) for _ in range(2 * NUM_SERVERS)]
        listed = [one for _ in range(NUM_SERVERS) for one in do(client.snapshots.list())]
        assert {one.id for one in loaded} < {one.id for one in listed} and len(listed) == len(loaded) + 1
        children = [child for one in (*loaded, *listed) for child in do(one.restore())]
        assert {one.server for one in children} == set(servers.names)
        assert set(do(client.snapshots.release(listed))) == {SnapshotState.RELEASED}
        do(client.close([sequence, *children]))
        assert servers.num_open == [0] * NUM_SERVERS


def test_what_a_server_held_before_it_was_started_again_is_lost(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    do, servers = driven.do, start(2, advertise="a.example:1")  # the second stands for the first, started again
    with balanced(servers.addresses, lambda metadata: 0) as balancer:
        client = clients(balancer.address)
        sequence = do(client.open())
        balancer.policy = lambda metadata: 1
        with pytest.raises(StateLost):
            do(sequence.decode(tokens(1)))
        assert do(client.close([sequence])) == [SequenceState.LOST]
        assert "could not be closed" not in caplog.text


def test_a_close_that_may_have_come_to_another_server_is_told_in_the_log(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    do, servers = driven.do, start(2, advertise=None)
    with balanced(servers.addresses, round_robin(2)) as balancer, caplog.at_level(logging.WARNING):
        client = clients(balancer.address)
        sequences = do(client.open_many(2))
        assert do(client.close(sequences)) == [SequenceState.LOST] * 2
        assert "2 sequences could not be closed" in caplog.text
        assert servers.num_open == [2, 0]


def test_one_server_that_is_not_reached_keeps_nothing_of_the_others_open(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, start(2)
    with balanced(servers.addresses, round_robin(2)) as balancer:
        client = clients(balancer.address, servers=servers.names[1:])
        sequences = [do(client.open()) for _ in range(4)]
        balancer.policy = lambda metadata: 1
        with pytest.raises(StateElsewhere):
            do(client.close(sequences))
        assert servers.num_open == [2, 0]


def test_a_link_to_one_server_carries_nothing_of_another(
    driven: Driven, make_server: Callable[..., Server], clients: Callable[..., Any], tmp_path: Path
) -> None:
    do, links = driven.do, [str(tmp_path / name / "link.sock") for name in "ab"]
    servers = [make_server(advertise="127.0.0.1", link=link) for link in links]
    with served(servers[0]) as first, served(servers[1]) as second:
        names = [server.identity.name for server in servers]
        with balanced([first, second], round_robin(2)) as balancer:
            client = clients(balancer.address, servers=names)
            sequences = [do(client.open()) for _ in range(2)]  # before anything is known of a link
            assert {one.server for one in sequences} == set(names)
            assert do(client.info()).is_linked
            for seed in range(3):
                outputs = do(client.decode(sequences, np.repeat(tokens(1, seed), 2, axis=0)))
                assert np.array_equal(outputs[0], outputs[1])
            assert [do(one.decode(tokens(1, 9))).shape for one in sequences] == [(1, 64)] * 2
            assert do(client.close(sequences)) == [SequenceState.CLOSED] * 2
            assert [server.runtime.table.num_open for server in servers] == [0, 0]


def test_a_link_that_ends_leaves_grpc_also_in_calls_about_several_servers(
    driven: Driven, make_server: Callable[..., Server], clients: Callable[..., Any], tmp_path: Path
) -> None:
    do, folder = driven.do, tmp_path / "run"
    servers = [make_server(advertise="127.0.0.1", link=link) for link in (f"{folder}/link.sock", "off")]
    with served(servers[0]) as first, served(servers[1]) as second:
        path = hidden_link(servers[0])
        with LinkProxy(folder, f"{folder}/hidden.sock", [30]) as proxy, balanced([first, second], lambda _: 0) as front:
            Path(proxy.path).rename(path)
            client = clients(front.address, servers=[server.identity.name for server in servers], timeout=10.0)
            front.policy = lambda metadata: 1
            others = do(client.open_many(2))
            front.policy = lambda metadata: 0
            assert do(client.info()).is_linked
            sequences = [do(client.open()), *others]
            path.unlink()  # no other connection comes
            for seed in range(40):
                outputs = do(client.decode(sequences, np.repeat(tokens(1, seed), 3, axis=0)))
                assert all(np.array_equal(row, outputs[0]) for row in outputs)
            assert proxy.kills == 1
            assert do(client.close(sequences)) == [SequenceState.CLOSED] * 3


def test_shared_memory_of_one_server_holds_nothing_for_another(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any]
) -> None:
    do, servers = driven.do, start(2, shared_memory_bytes=1 << 22)
    with balanced(servers.addresses, round_robin(2)) as balancer:
        client = clients(balancer.address, servers=servers.names, shared_memory_bytes=1 << 20)
        sequences = [do(client.open()) for _ in range(4)]
        for seed in range(4):
            outputs = do(client.decode(sequences, np.repeat(tokens(1, seed), 4, axis=0)))
            assert all(np.array_equal(row, outputs[0]) for row in outputs)
            for one in sequences:
                do(one.decode(tokens(1, seed + 10)))
        do(client.close(sequences))
    made = [sample(server, "grpc_server_started", grpc_method="CreateSharedMemory") for server in servers.servers]
    assert sorted(made) == [0, 1]
    assert [sample(server, "deltaline_refused", reason="INVALID_SHARED_MEMORY") for server in servers.servers] == [0, 0]


def sample(server: Server, name: str, **labels: str) -> float:
    """The sum of a counter's samples with these labels."""
    return sum(
        one.value
        for metric in server.metrics.registry.collect()
        for one in metric.samples
        if one.name == f"{name}_total" and labels.items() <= one.labels.items()
    )
