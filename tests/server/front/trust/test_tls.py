"""Certificates from files: taken when they change, else not read, and kept where the new ones can't be used."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from rigs.authority import Authority, Pair, pem_of, put

from deltaline_server.front.trust import tls as module
from deltaline_server.front.trust.tls import Tls, TlsError

HOUR_S = 3600.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def made(authority: Authority, pair: Pair, *, of_clients: bool = False) -> Tls:
    return Tls(str(pair.cert), str(pair.key), str(authority.ca) if of_clients else None)


def test_files_that_changed_are_taken(authority: Authority) -> None:
    tls = made(authority, authority.issue("server"))
    first = tls.context()
    assert 23 * HOUR_S < tls.expires_s - time.time() <= 24 * HOUR_S
    authority.issue("server", life=timedelta(hours=3))
    assert tls.context() is not first
    assert 2 * HOUR_S < tls.expires_s - time.time() <= 3 * HOUR_S
    assert (tls.num_taken, tls.num_refused) == (1, 0)


def test_files_are_read_only_where_time_size_or_number_changed(authority: Authority) -> None:
    pair = authority.issue("server")
    tls, before = made(authority, pair), pair.cert.stat()
    first = tls.context()
    pair.cert.write_bytes(b"x" * before.st_size)
    os.utime(pair.cert, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tls.context() is first and tls.num_refused == 0
    os.utime(pair.cert)
    assert tls.context() is first and tls.num_refused == 1


def test_files_that_are_what_they_were_are_not_taken_anew(authority: Authority) -> None:
    """As after a change that came while they were looked at: one file's number was the new one, another's the old."""
    pair = authority.issue("server")
    tls = made(authority, pair)
    first = tls.context()
    put(pair.cert, pair.cert.read_bytes())
    assert tls.context() is first and (tls.num_taken, tls.num_refused) == (0, 0)


def spoilt_key(authority: Authority, pair: Pair) -> None:
    put(pair.key, authority.issue("other").key.read_bytes())


def encrypted_key(authority: Authority, pair: Pair) -> None:
    put(pair.key, pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret"))


def no_pem(authority: Authority, pair: Pair) -> None:
    put(pair.cert, b"no certificate")


def half_written(authority: Authority, pair: Pair) -> None:
    put(pair.cert, pair.cert.read_bytes()[:300])


def missing(authority: Authority, pair: Pair) -> None:
    pair.key.unlink()


def too_large(authority: Authority, pair: Pair) -> None:
    put(pair.cert, pair.cert.read_bytes() + bytes(module.MAX_FILE_BYTES))


def expired(authority: Authority, pair: Pair) -> None:
    authority.issue("server", life=timedelta(seconds=-5))


def not_yet(authority: Authority, pair: Pair) -> None:
    authority.issue("server", life=timedelta(days=3))


def no_ca(authority: Authority, pair: Pair) -> None:
    put(authority.ca, b"no certificate")


WRONG: dict[Callable[[Authority, Pair], None], str] = {
    spoilt_key: "--tls-cert, --tls-key: .*key values mismatch",
    encrypted_key: "--tls-cert, --tls-key: .*the key is encrypted",
    no_pem: "--tls-cert, --tls-key: .*in PEM",
    half_written: "--tls-cert, --tls-key: ",
    missing: "--tls-key: .*No such file",
    too_large: "--tls-cert: expected at most 1048576 bytes",
    expired: "--tls-cert: .*certificate has expired",
    not_yet: "--tls-cert: .*certificate is not yet valid",
    no_ca: "--tls-client-ca: expected certificates in PEM",
}


@pytest.mark.parametrize("spoil", WRONG)
def test_what_can_t_be_used_is_named_at_the_start_and_later_leaves_what_was_there(
    spoil: Callable[[Authority, Pair], None], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue("server")
    tls = made(authority, pair, of_clients=True)
    first, expires_s, ca = tls.context(), tls.expires_s, authority.ca.read_bytes()
    spoil(authority, pair)
    with pytest.raises(TlsError, match=WRONG[spoil]):
        made(authority, pair, of_clients=True)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert tls.context() is first and tls.expires_s == expires_s
    assert (tls.num_taken, tls.num_refused) == (0, 1)
    assert [record.getMessage() for record in caplog.records] == ["certificate refused, the one before stays"]
    put(authority.ca, ca)
    authority.issue("server")
    assert tls.context() is not first and tls.num_taken == 1
