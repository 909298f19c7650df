"""TLS end to end: who is let in, who is not, and certificates that change while clients step."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from rigs.authority import Authority, Pair, put
from rigs.served import served
from rigs.until import until

from deltaline_cli import health, main
from deltaline_client import AsyncClient, Client, Retry, Tls, Unavailable
from deltaline_server.app import Server, StartError
from deltaline_server.front import grpc_port

HIDDEN = 64
ONCE = Retry(max_attempts=1)
CLIENTS = 8


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process imports, its front ends do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def make_tls_server(make_server: Callable[..., Server], authority: Authority) -> Callable[..., Server]:
    """A function that makes a server which asks clients for a certificate."""
    pair = authority.issue("server")

    def make(**changes: Any) -> Server:
        tls = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_client_ca": str(authority.ca)}
        return make_server(**(tls | changes))

    return make


def known(authority: Authority, pair: Pair, ca: Path | None = None, **more: Any) -> Tls:
    return Tls(ca or authority.ca, pair.cert, pair.key, **more)


def total(server: Server, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"{name}_total", labels) or 0.0


def serial_shown(server: Server, tls: Tls, port: int | None = None) -> str:
    """The serial number of the certificate that a new connection is shown."""
    context = tls.context()
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(_connected(server.port if port is None else port), server_hostname="localhost") as end:
        shown = end.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def token(seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((1, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("front_ends", [0, 1])
async def test_who_is_let_in_and_who_is_not(
    make_tls_server: Callable[..., Server], authority: Authority, tmp_path: Path, front_ends: int
) -> None:
    mine, strange = authority.issue("client", "spiffe://here/client"), Authority(tmp_path, "strange")
    refused: dict[str, Tls | None] = {
        "plain text": None,
        "no certificate": Tls(authority.ca),
        "another's certificate": known(authority, strange.issue("stranger")),
        "an expired one": known(authority, authority.issue("late", life=timedelta(seconds=-5))),
        "another's server": known(authority, mine, strange.ca),
        "another server's name": known(authority, mine, server_name="elsewhere"),
    }
    async with make_tls_server(front_ends=front_ends) as server:
        for address in (server.address, f"localhost:{server.port}"):
            async with AsyncClient(address, tls=known(authority, mine)) as client, await client.open() as sequence:
                await sequence.decode(token())
        for why, tls in refused.items():
            with pytest.raises(Unavailable, match=r"Socket closed|CERTIFICATE_VERIFY_FAILED|Hostname"):
                async with AsyncClient(server.address, tls=tls, retry=ONCE) as client:
                    pytest.fail(f"{why}: {await client.info()}")
            with pytest.raises(Unavailable), Client(server.address, tls=tls, retry=ONCE) as blocking:
                pytest.fail(f"{why}: {await asyncio.to_thread(blocking.info)}")
        other = known(authority, authority.issue("odd", "elsewhere"), server_name="localhost")
        async with AsyncClient(server.address, tls=other) as client:
            assert (await client.info()).hidden_size == HIDDEN


async def test_without_authorities_of_clients_none_needs_a_certificate(
    make_tls_server: Callable[..., Server], authority: Authority
) -> None:
    async with (
        make_tls_server(tls_client_ca=None) as server,
        AsyncClient(server.address, tls=Tls(authority.ca)) as client,
        await client.open() as sequence,
    ):
        assert (await sequence.decode(token())).shape == (1, HIDDEN)


@pytest.mark.parametrize("front_ends", [0, 2])
async def test_certificates_change_under_clients_that_step(
    make_tls_server: Callable[..., Server],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    front_ends: int,
) -> None:
    monkeypatch.setattr(grpc_port, "AGE_GRACE_MS", 200)
    tls, cert = known(authority, authority.issue("client")), Path(authority.issue("server").cert)
    done, is_over = [0] * CLIENTS, False

    async def step(number: int, address: str) -> int:
        async with AsyncClient(address, tls=tls, timeout=30.0) as client, await client.open() as sequence:
            while not is_over:
                await sequence.decode(token(number))
                done[number] += 1
            [description] = await client.describe([sequence])
            return int(description.spans[0].position)

    async with make_tls_server(max_connection_age_s=1, front_ends=front_ends, metrics_port=0) as server:
        stepping = [asyncio.create_task(step(number, server.address)) for number in range(CLIENTS)]
        shown = [await asyncio.to_thread(serial_shown, server, tls)]
        for turn in range(1, 3):
            put(cert, b"half of a certifi")
            await until(partial(has_refused, server, turn))
            # A front end that took no connection meanwhile has not seen the one before.
            assert await asyncio.to_thread(serial_shown, server, tls) in shown
            authority.issue("server")
            # The streams of front ends have the whole grace: none ends here.
            await until(partial(have_stepped, server, done, 20 * turn, 0 if front_ends else 2 * CLIENTS * turn))
            shown.append(await asyncio.to_thread(serial_shown, server, tls))
            assert await asyncio.to_thread(serial_shown, server, tls, server.metrics_port) == shown[-1]
        is_over = True
        positions = await asyncio.gather(*stepping)
    assert positions == done
    assert len(set(shown)) == 3 and total(server, "deltaline_tls_reloads") == 2


def has_refused(server: Server, count: int) -> bool:
    """Whether it has refused files so often, or once more: a new key beside what is left of a certificate."""
    return total(server, "deltaline_tls_refusals") >= count


def have_stepped(server: Server, done: list[int], num_steps: int, num_streams: int) -> bool:
    """Whether each has made so many steps, and all have opened so many streams: one more when a connection ends."""
    labels = {"grpc_type": "bidi_stream", "grpc_service": "deltaline.v1.LayerService", "grpc_method": "StepStream"}
    return min(done) > num_steps and total(server, "grpc_server_started", **labels) > num_streams


async def test_metrics_need_a_certificate_and_probes_do_not(
    make_tls_server: Callable[..., Server], authority: Authority
) -> None:
    mine, nobody = known(authority, authority.issue("client")), Tls(authority.ca)
    strange = known(authority, Authority(authority.ca.parent, "strange").issue("stranger"))

    def get(path: str, tls: Tls | None) -> int:
        url = f"http{'s' * (tls is not None)}://localhost:{server.metrics_port}{path}"
        try:
            with urlopen(url, timeout=30, context=None if tls is None else tls.context()) as answer:
                answer.read()
                return int(answer.status)
        except HTTPError as error:
            return error.code

    async with make_tls_server(metrics_port=0) as server:
        pages = [("/readyz", nobody), ("/healthz", nobody), ("/metrics", nobody), ("/metrics", mine)]
        assert [await asyncio.to_thread(get, *page) for page in pages] == [200, 200, 403, 200]
        for tls in (None, strange):
            with pytest.raises((OSError, ssl.SSLError)):
                await asyncio.to_thread(get, "/readyz", tls)
        with await asyncio.to_thread(_connected, server.metrics_port):  # says nothing, and holds up nobody
            assert await asyncio.to_thread(get, "/readyz", nobody) == 200
    async with make_tls_server(metrics_port=0, tls_client_ca=None) as server:
        assert await asyncio.to_thread(get, "/metrics", nobody) == 200


async def test_a_client_with_a_certificate_takes_the_link_only_by_its_name(
    make_tls_server: Callable[..., Server], authority: Authority, tmp_path: Path
) -> None:
    path, mine = str(tmp_path / "run" / "link.sock"), known(authority, authority.issue("client"))
    async with make_tls_server(link=path, tls_client_ca=None) as server:
        for address, tls, is_linked in (
            (server.address, Tls(authority.ca), True),
            (server.address, mine, False),
            (f"link:{path}", mine, True),
        ):
            async with AsyncClient(address, tls=tls) as client:
                assert (await client.info()).is_linked is is_linked
            with Client(address, tls=tls) as blocking:
                assert (await asyncio.to_thread(blocking.info)).is_linked is is_linked


async def test_a_pair_that_can_t_be_used_ends_the_start(
    make_tls_server: Callable[..., Server], authority: Authority
) -> None:
    authority.issue("server", life=timedelta(seconds=-5))
    with pytest.raises(StartError, match=r"^--tls-cert: .*certificate has expired"):
        await make_tls_server().start()


def test_the_command_speaks_tls_and_says_what_to_do_where_it_can_t(
    make_tls_server: Callable[..., Server],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
        return command(list(arguments)), "".join(capsys.readouterr())

    mine, strange = authority.issue("client"), Authority(authority.ca.parent, "strange")
    other = strange.issue("other")
    ca, shows = ["--tls-ca", str(authority.ca)], ["--tls-cert", str(mine.cert), "--tls-key", str(mine.key)]
    monkeypatch.setattr(main, "Client", lambda *args, **more: Client(*args, **more | {"retry": ONCE}))
    with served(make_tls_server(uds=str(authority.ca.parent / "s"))) as address:
        assert run(health.main, address, *ca, *shows) == (0, f"{address}: SERVING\n")
        code, said = run(health.main, address, *ca)
        assert code == 1 and "UNAVAILABLE" in said
        code, said = run(health.main, address, "--tls-ca", "/nothing")
        assert code == 1 and said.startswith("deltaline: error: tls.ca: ")
        for flags, advice in (
            ([], "Does it speak TLS? Give --tls-ca."),
            (ca, "Does it ask for a certificate? Give --tls-cert and --tls-key."),
            (
                [*ca, "--tls-cert", str(other.cert), "--tls-key", str(other.key)],
                "Has the certificate of --tls-cert expired",
            ),
            (["--tls-ca", str(strange.ca), *shows], "is not signed by one of --tls-ca"),
            ([*ca, *shows, "--tls-name", "elsewhere"], "give that as --tls-name"),
        ):
            code, said = run(main.main, "load", address, *flags)
            assert code == 1 and advice in said
        for name, value in (("CA", authority.ca), ("CERT", mine.cert), ("KEY", mine.key)):
            monkeypatch.setenv(f"DELTALINE_TLS_{name}", str(value))
        for reached in (address, f"unix:{authority.ca.parent}/s"):
            assert run(health.main, reached)[0] == run(main.main, "load", reached)[0] == 0
