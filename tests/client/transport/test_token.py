"""A client's token: where it comes from, where it may go, and that nobody is shown it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deltaline.tls import Tls
from deltaline_client import AsyncClient, Client
from deltaline_client._transport.caller import Caller
from deltaline_client._transport.flow import MayGo, Server
from deltaline_client._transport.token import Token
from deltaline_client._transport.transport import Transport

SECRET = "s3cret-token"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("address", ["10.0.0.1", "server.example:50051", "dns:localhost:1", "ipv4:10.0.0.1:1"])
def test_a_token_does_not_leave_the_host_in_plain_text(kind: Any, address: str) -> None:
    with pytest.raises(ValueError, match="token: expected tls beside it") as refused:
        kind(address, token=SECRET)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "127.0.0.1:1", "[::1]:1", "ipv6:[::1]:1", "unix:/run/x.sock", "link:/run/x.sock"],
)
def test_it_may_go_to_this_host(address: str) -> None:
    token = Token.of(SECRET, None, address, None)
    assert token is not None and token.header() == ("authorization", f"Bearer {SECRET}")
    assert token.header() in Caller(token).metadata()


@pytest.mark.parametrize(
    ("target", "expected"), [("127.0.0.1:2", True), ("10.0.0.1:50051", False), ("link:/run/x.sock", False)]
)
def test_it_follows_a_target_of_a_move_on_this_host_alone(target: str, expected: bool) -> None:
    caller, go = Caller(Token.of(SECRET, None, "127.0.0.1:1", None)), MayGo(Server(1, target))
    transport = Transport("127.0.0.1:1", caller=caller)
    assert not transport.session().may_go(go)
    caller.named.add(target)
    assert transport.session().may_go(go) is expected
    transport.close()


def test_with_tls_it_may_go_anywhere() -> None:
    assert Token.of(SECRET, None, "server.example:50051", Tls()) is not None


@pytest.mark.parametrize("content", ["", " ", "two words", "line\nline", "ünï", "x" * 8193])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    for given in ({"token": content}, {"token_file": path}):
        with pytest.raises(ValueError, match="8192 visible ASCII characters") as refused:
            Client("127.0.0.1", **given)
        assert not content.strip() or content not in str(refused.value)


def test_one_of_both_and_a_file_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token, token_file: expected one of them, got both"):
        Client("127.0.0.1", token=SECRET, token_file=tmp_path)
    with pytest.raises(ValueError, match="token_file: expected a file with a token"):
        Client("127.0.0.1", token_file=tmp_path / "absent")


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = Token(None, path)
    assert token.header() == ("authorization", "Bearer first")
    beside = tmp_path / "new"
    for content, expected in (("second", "second"), ("no token", "second"), ("third", "third")):
        beside.write_text(content)
        os.replace(beside, path)
        assert token.header() == ("authorization", f"Bearer {expected}")
    path.unlink()
    assert token.header() == ("authorization", "Bearer third")


def test_nobody_is_shown_it() -> None:
    with Client("127.0.0.1:1", token=SECRET) as client:
        for shown in (client, Token(SECRET, None)):
            assert SECRET not in repr(shown) + str(shown)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_is_followed_to_other_hosts_by_tls_alone(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"token: expected tls beside it .*, got '10\.0\.0\.1:1'"):
        kind("localhost", token=SECRET, servers=["localhost:1", "10.0.0.1:1"])
    with pytest.raises(ValueError, match="servers: expected several addresses, got the text 'localhost:1'"):
        kind("localhost", servers="localhost:1")
    with pytest.raises(ValueError, match="address: expected HOST"):
        kind("localhost", servers=["no address"])
    with pytest.raises(TypeError, match=r"servers\[1\]: expected an address, got int"):
        kind("localhost", servers=["localhost:1", 1])
    with pytest.raises(TypeError, match="servers: expected addresses, got int"):
        kind("localhost", servers=1)
