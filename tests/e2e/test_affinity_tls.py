"""Which addresses a client follows: where a server proves to be who its name says, and where it was told to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from rigs.authority import Authority, Pair
from rigs.balancer import balanced, by_name, round_robin
from rigs.linked import Driven
from rigs.named_servers import Servers, run_round

from deltaline_client import Tls

pytestmark = pytest.mark.parametrize("device", ["cpu"])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def options_of(pair: Pair) -> dict[str, str]:
    """Of a server that shows a certificate."""
    return {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}


def ends(authority: Authority, pair: Pair) -> dict[str, Any]:
    """What a balancer shows to clients, and whom it believes."""
    return {
        "server_credentials": grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())]),
        "channel_credentials": grpc.ssl_channel_credentials(authority.ca.read_bytes()),
    }


def test_with_tls_every_name_is_followed_that_its_server_proves(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any], authority: Authority
) -> None:
    servers, front = start(2, **options_of(authority.issue("server"))), authority.issue("front", "front.example")
    with balanced(servers.addresses, round_robin(2), **ends(authority, front)) as balancer:
        # The name that the given address is excused by is none of the servers'.
        client = clients(balancer.address, tls=Tls(authority.ca, server_name="front.example"))
        for _ in range(4):
            run_round(driven, client)
        assert servers.num_open == [0, 0]
        assert balancer.servers_of("OpenSequences") == {0, 1} and not balancer.servers_of("StepStream")


@pytest.mark.parametrize("of", ["another authority", "another host", "not one of those that may be followed"])
def test_who_does_not_prove_a_name_is_shown_nothing(
    driven: Driven,
    start: Callable[..., Servers],
    clients: Callable[..., Any],
    authority: Authority,
    tmp_path: Path,
    of: str,
) -> None:
    pair, strange = authority.issue("server"), authority.issue("strange", "front.example")
    if of == "another authority":
        strange = Authority(tmp_path, "other").issue("strange")
    elif of != "another host":
        strange = pair
    servers, options = start(1, **options_of(pair)), {}
    if of == "not one of those that may be followed":
        options["servers"] = ["127.0.0.1:1"]
    with balanced(servers.addresses, round_robin(1), **ends(authority, strange)) as impostor:
        servers.servers[0].identity.name = impostor.address
        with balanced(servers.addresses, by_name([impostor.address]), **ends(authority, pair)) as balancer:
            client = clients(balancer.address, tls=Tls(authority.ca), token="secret", **options)
            run_round(driven, client)
            assert servers.num_open == [0] and balancer.servers_of("StepStream") == {0}
            assert impostor.routed == []


def test_a_name_that_is_no_host_and_port_is_not_followed(
    driven: Driven, start: Callable[..., Servers], clients: Callable[..., Any], authority: Authority, tmp_path: Path
) -> None:
    """Such as the path of a socket, where nobody would have to prove anything."""
    pair = authority.issue("server")
    servers, path = start(1, **options_of(pair)), f"unix:{tmp_path}/listening"
    believed = {"channel_credentials": ends(authority, pair)["channel_credentials"]}
    with balanced(servers.addresses, round_robin(1), listen=path, **believed) as listening:
        servers.servers[0].identity.name = path
        client = clients(servers.addresses[0], tls=Tls(authority.ca), token="secret")
        run_round(driven, client)
        assert listening.routed == []
