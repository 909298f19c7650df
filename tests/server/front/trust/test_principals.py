"""Who a call is from: a token before a certificate, and nobody without either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from rigs.principals import entry, headers, token_of, write_principals
from rigs.scheduler_rig import refuses

from deltaline_server.errors import Reason
from deltaline_server.front.trust.principals import Principals, current_principal, open_principals
from deltaline_server.front.trust.principals_file import Known, PrincipalsFile
from deltaline_server.front.trust.roles import OPEN, ROLES, Role
from deltaline_server.principal import Principal

STEP, LOAD, DRAIN = (
    f"/deltaline.v1.{name}" for name in ("LayerService/Step", "AdapterService/LoadAdapter", "AdminService/Drain")
)
HEALTH = "/grpc.health.v1.Health/Check"


class Context:
    """A call by gRPC."""

    def __init__(self, metadata: Sequence[tuple[str, Any]] = (), peer: str = "ipv4:127.0.0.1:9", **proven: Any) -> None:
        self._metadata, self._peer, self._proven = metadata, peer, proven

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Any:
        return self._proven

    def invocation_metadata(self) -> Any:
        return self._metadata


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    """A test leaves no principal behind, whom a later one could take for its own."""
    before = whose()
    yield
    assert whose() is before


def whose() -> Principal | None:
    try:
        return current_principal()
    except LookupError:
        return None


def admitted(principals: Principals, method: str, context: Context) -> Principal:
    """Judge a call as in a task of its own; who that is from then."""

    def judge() -> Principal:
        principals.admit(method, context)
        return current_principal()

    return copy_context().run(judge)


@pytest.fixture
def principals(tmp_path: Path) -> Principals:
    a = entry("a", "step", identities=["a.org"], uids=[7])
    return Principals(PrincipalsFile(write_principals(tmp_path / "p.toml", a, entry("b", "admin"))))


def test_a_call_is_its_credentials_principals(principals: Principals) -> None:
    for context in (Context(headers("a")), Context(peer_dns=[b"a.org"]), Context(uid=[b"7"], peer="link:7:1")):
        assert admitted(principals, STEP, context).name == "a"
    drains = admitted(principals, DRAIN, Context(headers("b"), peer_dns=[b"a.org"]))
    assert drains.name == "b", "a token goes before a certificate"


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (Context(), Reason.CREDENTIALS_MISSING),
        (Context(peer_dns=[b"evil.org"]), Reason.CREDENTIALS_MISSING),
        (Context(uid=[b"8"], peer="link:8:1"), Reason.CREDENTIALS_MISSING),
        (Context(headers("a", "wrong")), Reason.CREDENTIALS_UNKNOWN),
        (Context(headers("a", "wrong"), peer_dns=[b"a.org"]), Reason.CREDENTIALS_UNKNOWN),
        (Context((("authorization", "Basic " + token_of("a")),)), Reason.CREDENTIALS_UNKNOWN),
        (Context((("authorization", "ApiKey " + token_of("a")),)), Reason.CREDENTIALS_UNKNOWN),
        (Context((("authorization", "Bearer"),)), Reason.CREDENTIALS_UNKNOWN),
        (Context((("authorization", token_of("a")),)), Reason.CREDENTIALS_UNKNOWN),
        (Context((*headers("a"), *headers("b"))), Reason.CREDENTIALS_UNKNOWN),
        (Context(headers("a"), peer="ipv4:10.0.0.1:5"), Reason.TOKEN_IN_PLAINTEXT),
        (Context(headers("b")), Reason.ROLE_MISSING),
    ],
)
def test_others_are_refused(principals: Principals, context: Context, reason: Reason) -> None:
    with refuses(reason) as caught:
        principals.admit(STEP, context)
    assert token_of("a") not in caught.value.refusal.message
    assert ("a user" in caught.value.refusal.message) is (context.peer() == "link:8:1"), "what helps is named"


@pytest.mark.parametrize("header", ["Basic x", "Bearer", "Bearer ", "Bearer \t", "", token_of("a"), b"Bearer x"])
def test_a_header_without_a_token_is_never_looked_up(
    principals: Principals, header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()
    monkeypatch.setattr(Known, "of_token", lambda known, token: looked_up.append(token))
    for context in (Context((("authorization", header),)), Context((*headers("a"), *headers("b")))):
        with refuses(Reason.CREDENTIALS_UNKNOWN):
            principals.admit(STEP, context)
    assert looked_up == []


def test_a_token_over_tls_may_come_from_anywhere(principals: Principals) -> None:
    context = Context(headers("a"), peer="ipv4:10.0.0.1:5", transport_security_type=[b"ssl"])
    assert admitted(principals, STEP, context).name == "a"


def test_health_is_open_and_a_method_that_is_not_in_the_table_is_nobodys(principals: Principals) -> None:
    assert principals.admit(HEALTH, Context(headers("a", "wrong"))) is None
    with refuses(Reason.ROLE_MISSING):
        principals.admit("/deltaline.v1.LayerService/New", Context(headers("b")))


@pytest.mark.parametrize(
    ("host", "peer", "allowed"),
    [
        ("127.0.0.1", "ipv4:127.0.0.1:9", (STEP, LOAD, DRAIN)),
        ("localhost", "ipv6:%5B::1%5D:9", (STEP, LOAD, DRAIN)),
        ("0.0.0.0", "ipv4:10.0.0.1:9", (STEP, LOAD)),
        # A proxy on this host brings calls from elsewhere.
        ("0.0.0.0", "ipv4:127.0.0.1:9", (STEP, LOAD)),
        ("0.0.0.0", "unix:", (STEP, LOAD, DRAIN)),
        ("0.0.0.0", "link:7:1", (STEP, LOAD, DRAIN)),
    ],
)
def test_without_principals_all_are_anonymous(host: str, peer: str, allowed: tuple[str, ...]) -> None:
    principals = open_principals(None, host)
    for method in (STEP, LOAD, DRAIN):
        if method in allowed:
            principal = admitted(principals, method, Context(headers("a", "any"), peer=peer))
            assert (principal.number, principal.name) == (0, "anonymous")
        else:
            with refuses(Reason.ROLE_MISSING):
                principals.admit(method, Context(peer=peer))


def test_a_change_of_the_file_counts(principals: Principals, tmp_path: Path) -> None:
    write_principals(tmp_path / "p.toml", entry("a", "admin"))
    assert principals.generation == 0
    principals.reload()
    assert principals.generation == 1
    with refuses(Reason.ROLE_MISSING):
        principals.admit(STEP, Context(headers("a")))
    with refuses(Reason.CREDENTIALS_UNKNOWN):
        principals.admit(DRAIN, Context(headers("b")))


def test_every_role_opens_something_of_its_own_but_peer() -> None:
    for role in set(Role) - {Role.PEER}:
        assert any(roles and role in roles and len(roles) < len(Role) for roles in ROLES.values())
    assert {method for method, roles in ROLES.items() if roles is OPEN} == {HEALTH, HEALTH.replace("Check", "Watch")}
