"""Clients whose server has a link that can't carry their calls: they go by gRPC, or are told why not."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.link_proxy import LinkProxy
from rigs.linked import FAST, HIDDEN, Driven, hidden_link, tokens
from rigs.served import served

from deltaline import link_socket
from deltaline_client import Disconnected, Retry, Unavailable
from deltaline_server.app import Server
from deltaline_server.front.link import listener


def test_a_found_link_that_ends_leaves_grpc(
    driven: Driven, linked: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o700)
    path = hidden_link(linked)
    with LinkProxy(tmp_path, str(path.with_name("hidden.sock")), [30]) as proxy, caplog.at_level(logging.INFO):
        Path(proxy.path).rename(path)
        client = driven.make(linked.address, retry=FAST)
        sequence = driven.do(client.open())
        assert driven.do(client.info()).is_linked
        path.unlink()  # no other connection comes
        for position in range(60):
            assert driven.do(sequence.decode(tokens(1, position))).shape == (1, HIDDEN)
        assert proxy.kills == 1
        assert driven.do(client.describe([sequence]))[0].spans[0].position == 60
        assert driven.do(client.info()).is_linked is False
        assert driven.do(client.info(refresh=True)).is_linked is False
        driven.do(client.disconnect())
    told = [record.getMessage() for record in caplog.records if record.name.startswith("deltaline_client")]
    assert told[0] == f"this client's calls go by the local link {path}"
    assert told[1].startswith("no local link, calls go by gRPC: no server answers")


@pytest.mark.parametrize("side", [link_socket, listener])
def test_where_sockets_have_no_room_for_packets_calls_go_by_grpc(
    driven: Driven, linked: Server, monkeypatch: pytest.MonkeyPatch, side: Any
) -> None:
    def make_room(connected: Any) -> None:
        raise OSError(errno.EMSGSIZE, "a socket may have too few bytes")

    monkeypatch.setattr(side, "make_room", make_room)
    client = driven.make(linked.address)
    assert driven.do(client.info()).is_linked is False
    assert driven.do(driven.do(client.open()).decode(tokens(1))).shape == (1, HIDDEN)
    monkeypatch.setattr(side, "make_room", lambda connected: None)
    assert driven.do(client.info(refresh=True)).is_linked
    monkeypatch.setattr(side, "make_room", make_room)
    named = driven.make(f"link:{linked.link.path}", retry=Retry(max_attempts=1))
    with pytest.raises(Unavailable, match="a socket may have too few bytes"):
        driven.do(named.info())
    for one in (client, named):
        driven.do(one.disconnect())


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_a_found_link_without_memory_leaves_grpc(
    driven: Driven, make_server: Callable[..., Server], link_option: str, memory_bytes: int
) -> None:
    with served(make_server(link=link_option, link_memory_bytes=memory_bytes)) as address:
        client = driven.make(address, retry=FAST)
        small, large = driven.do(client.open_many(2))
        driven.do(small.decode(tokens(1)))
        assert driven.do(client.info()).is_linked
        assert driven.do(large.prefill(tokens(1500))).shape == (1500, HIDDEN)
        assert not driven.do(client.info()).is_linked
        assert driven.do(small.decode(tokens(1))).shape == (1, HIDDEN)
        driven.do(client.disconnect())
        named = driven.make(f"link:{link_option}", retry=Retry(max_attempts=1))
        with pytest.raises(Unavailable, match="no link memory is to be had: "):
            driven.do(named.adapters.load("large", config=bytes(200_000), tensors=b"x"))
        assert driven.do(driven.do(named.open()).decode(tokens(1))).shape == (1, HIDDEN)
        driven.do(named.disconnect())


def test_without_a_server_calls_say_so_in_words(driven: Driven, tmp_path: Path) -> None:
    client = driven.make(f"link:{tmp_path}/none.sock", retry=Retry(max_attempts=1))
    with pytest.raises(Unavailable, match=r"no server answers on the local link: .*No such file"):
        driven.do(client.info())
    driven.do(client.disconnect())
    with pytest.raises(Disconnected):
        driven.do(client.info())
