"""The examples of deploy/routing before three servers: whatever they do, nothing is lost and nothing is left open."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.authority import Authority, Pair
from rigs.linked import Driven, tokens
from rigs.named_servers import Servers
from rigs.routers import BY_AFFINITY, IN_TURNS, OPTIONS, routed

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import layer_service_pb2_grpc
from deltaline_client import SequenceState, Tls

pytestmark = [
    pytest.mark.parametrize("device", ["cpu"]),
    pytest.mark.parametrize("name", OPTIONS),
]
NUM_SERVERS, CLIENTS, ROUNDS, SEQUENCES = 3, 5, 3, 8


def drive(driven: Driven, client: Any, seed: int) -> set[str]:
    """Open sequences, one by one and together; prefill, verify, commit, decode and close all. Returns their servers."""
    do, rng = driven.do, np.random.default_rng(seed)
    sequences = [do(client.open()) for _ in range(SEQUENCES // 2)] + do(client.open_many(SEQUENCES // 2))
    prompts = [tokens(int(count), seed) for count in rng.integers(1, 40, SEQUENCES)]
    do(client.prefill(sequences, prompts))
    do(client.verify(sequences, np.stack([tokens(3, seed)] * SEQUENCES)))
    do(client.commit(sequences, [2] * SEQUENCES, now=bool(seed % 2)))
    for step in range(3):
        do(client.decode(sequences, tokens(SEQUENCES, step)))
    assert [one.position for one in sequences] == [len(prompt) + 5 for prompt in prompts]
    assert do(client.close(sequences)) == [SequenceState.CLOSED] * SEQUENCES
    return {one.server for one in sequences}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A certificate of the servers' and the router's, where the example looks for it, and that of its authority."""
    authority = Authority(tmp_path, "ca")
    return authority.issue("tls", "deltaline", "127.0.0.1")


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("policy", [BY_AFFINITY, IN_TURNS])
def test_nothing_is_lost_and_nothing_left_open(
    driven: Driven,
    start: Callable[..., Servers],
    clients: Callable[..., Any],
    tmp_path: Path,
    pair: Pair,
    name: str,
    policy: str,
    has_tls: bool,
) -> None:
    servers = start(NUM_SERVERS, **({"tls_cert": str(pair.cert), "tls_key": str(pair.key)} if has_tls else {}))
    options = {"tls": Tls(tmp_path / "ca.crt") if has_tls else None, "servers": servers.names}
    if policy == BY_AFFINITY:
        options["servers"] = []  # none has to be followed
    with routed(name, tmp_path, servers.addresses, policy, has_tls=has_tls) as router:
        seen = []
        for number in range(CLIENTS):
            client = clients(router.address, **options)
            seen += [drive(driven, client, ROUNDS * number + turn) for turn in range(ROUNDS)]
            if policy == BY_AFFINITY:
                assert len(set.union(*seen[-ROUNDS:])) == 1
        assert policy == BY_AFFINITY or set.union(*seen) == set(servers.names)
        assert servers.num_open == [0] * NUM_SERVERS


def test_unary_calls_of_an_affinity_reach_one_server(start: Callable[..., Servers], tmp_path: Path, name: str) -> None:
    servers = start(NUM_SERVERS)
    with (
        routed(name, tmp_path, servers.addresses, BY_AFFINITY) as router,
        grpc.insecure_channel(router.address) as channel,
    ):
        grpc.channel_ready_future(channel).result(60)
        stub: Any = layer_service_pb2_grpc.LayerServiceStub(channel)
        reached = set()
        for _ in range(20):
            metadata = (("deltaline-affinity", secrets.token_hex(16)),)
            opened = stub.OpenSequences(layers.OpenSequencesRequest(count=1), metadata=metadata, wait_for_ready=True)
            handles = {"server_epoch": opened.server_epoch, "sequence": opened.sequence}
            step = layers.StepRequest(
                **handles,
                kind=[layers.ROW_KIND_DECODE],
                step=[1],
                position=[0],
                query_start_loc=[0, 1],
                hidden=wire.encode(tokens(1)),
            )
            assert list(stub.Step(step, metadata=metadata).position) == [1]
            closed = stub.CloseSequences(layers.CloseSequencesRequest(**handles), metadata=metadata)
            assert list(closed.state) == [layers.SEQUENCE_STATE_CLOSED]
            reached.add(opened.server)
        assert len(reached) > 1
