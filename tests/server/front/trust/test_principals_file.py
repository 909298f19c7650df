"""The file of principals: what it may say, and what becomes of a change."""

from __future__ import annotations

import gc
import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.principals import digest_of, entry, token_of, write_principals

from deltaline_server.config import ConfigError
from deltaline_server.front.trust.principals_file import Known, PrincipalsFile
from deltaline_server.front.trust.roles import Role
from deltaline_server.principal import Quotas

# SHA-256 of nothing.
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def file_of(path: Path, *entries: dict[str, Any]) -> PrincipalsFile:
    return PrincipalsFile(write_principals(path / "principals.toml", *entries))


def names(known: Known) -> list[str]:
    return [principal.name for principal in known.principals]


def test_an_entry_says_all_of_a_principal(tmp_path: Path) -> None:
    quotas = {"sequences": 8, "queued_bytes": "1MiB", "prefill_tokens_per_s": 1000}
    identities = ["spiffe://example.org/a", "a.example.org"]
    known = file_of(
        tmp_path,
        entry("a", "step", "admin", tokens=["one", "two"], identities=identities, uids=[1000], quotas=quotas),
        entry("b"),
    ).known
    a, b = known.principals
    assert (a.name, a.roles, b.roles) == ("a", frozenset({Role.STEP, Role.ADMIN}), frozenset())
    assert (a.quotas, b.quotas) == (Quotas(8, queued_bytes=1 << 20, prefill_tokens_per_s=1000), None)
    assert known.of_token("one") is known.of_token("two") is a and known.of_token(token_of("b")) is b
    assert known.of_proven({"peer_spiffe_id": [b"spiffe://example.org/a"]}) is a
    assert known.of_proven({"peer_dns": [b"other.org", b"a.example.org"]}) is a
    assert known.of_proven({"uid": [b"1000"]}) is a
    assert 0 < a.number != b.number > 0


@pytest.mark.parametrize(
    "proven",
    [
        {},
        {"peer_dns": [b"A.example.org.evil"]},
        {"peer_email": [b"a.example.org"]},
        {"uid": [b"1"]},
        {"peer_dns": [b"1000"]},
        {"peer_dns": [b"a.example.org", b"b.example.org"]},
    ],
)
def test_what_is_not_proven_of_one_principal_is_nobodys(tmp_path: Path, proven: dict[str, list[bytes]]) -> None:
    a, b = ({"identities": [f"{name}.example.org"]} for name in "ab")
    assert file_of(tmp_path, entry("a", uids=[1000], **a), entry("b", **b)).known.of_proven(proven) is None


def test_a_wrong_token_is_compared_with_all_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, compared = file_of(tmp_path, *(entry(name, "step") for name in "abc")).known, list[bytes]()
    compare = hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for token in ("", "wrong", digest_of(token_of("a")), token_of("a") + "\0", "\udcff"):
        compared.clear()
        assert known.of_token(token) is None
        assert compared == list(known.digests)
    compared.clear()
    assert known.of_token(token_of("a")) is known.of_token(token_of("a")) is known.principals[0]
    assert compared == list(known.digests), "the second time it need not be looked for"


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([{"roles": ["step"]}], "principal 1: name: expected 1 to 64 of"),
        ([entry("anonymous")], "principal 1: name: expected"),
        ([entry("other")], "and not one of anonymous, shared, other, got 'other'"),
        ([entry("a\nb")], "principal 1: name: expected"),
        ([entry("a"), entry("a", tokens=[])], "principal 2: name: expected one that no other has"),
        ([entry("a", "root")], "roles: expected a list of some of step, adapter, admin, peer, got ['root']"),
        ([entry("a") | {"roles": "step"}], "roles: expected a list of some of step, adapter, admin, peer, got 'step'"),
        ([entry("a", tokens=["1", "2", "3"])], "tokens: expected at most 2, got 3"),
        (
            [entry("a", tokens=["1", ""])],
            f"principal 1: tokens: expected digests of tokens, got that of an empty one, {EMPTY}",
        ),
        ([entry("a") | {"tokens": [EMPTY.upper()]}], "tokens: expected digests of tokens, got that of an empty one"),
        ([entry("a", tokens=["1"]), entry("b", tokens=["1"])], "principal 2: tokens: expected none twice in the file"),
        ([entry("a", uids=[1]), entry("b", uids=[1])], "principal 2: uids: expected none twice in the file"),
        ([entry("a", uids=[True])], "uids: expected a list of numbers of users, got [True]"),
        ([entry("a", uids=[-1])], "uids: expected a list of numbers of users, got [-1]"),
        ([entry("a", identities=[""])], "identities: expected a list of SPIFFE ids and DNS names, got ['']"),
        ([entry("a", colour="red")], "expected the keys name, tokens, identities, uids, roles, quotas, got 'colour'"),
        ([entry("a", quotas={"lines": 1})], "adapter_bytes, prefill_tokens_per_s, snapshots, got 'lines'"),
        ([entry("a", quotas=[1])], "quotas: expected a table with some of sequences, queued_rows"),
        ([entry("a", quotas={"sequences": -1})], "quotas: sequences: expected 0 .. 1125899906842624, got -1"),
        ([entry("a", quotas={"sequences": "many"})], "quotas: sequences: expected a whole number, got 'many'"),
        ([entry("a", quotas={"queued_bytes": "1XB"})], "quotas: queued_bytes: expected a number of bytes such as"),
        ([entry(f"a{i}") for i in range(257)], "expected at most 256 principals, got 257"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name(tmp_path: Path, entries: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        file_of(tmp_path, *entries)
    assert why in str(refused.value) and str(refused.value).startswith("--principals: ")


def test_a_token_in_plain_text_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens: expected a list of SHA-256 digests") as refused:
        file_of(tmp_path, entry("a") | {"tokens": ["s3cret"]})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"principal = []", b"principal = 1", b"[principal]", b"[other]", b"\xff", b"[[principal", b"#" * (2**20 + 1)],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "principals.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--principals"):
        PrincipalsFile(str(path))


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="--principals"):
            PrincipalsFile(str(path))


def test_what_can_not_be_read_leaves_no_descriptor(tmp_path: Path) -> None:
    file, path = file_of(tmp_path, entry("a")), tmp_path / "principals.toml"
    path.unlink()
    gc.collect()  # else what other tests left may go in between
    num_open = len(os.listdir("/proc/self/fd"))
    ways: list[Callable[[], None]] = [
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
    ]
    for make in ways:
        make()
        file.reload()
        assert len(os.listdir("/proc/self/fd")) <= num_open
        path.rmdir() if path.is_dir() else path.unlink()
    assert names(file.known) == ["a"]


def test_a_change_counts_and_numbers_stay_with_names(tmp_path: Path) -> None:
    file = file_of(tmp_path, entry("a", "step"), entry("b"))
    number = {principal.name: principal.number for principal in file.known.principals}
    file.reload()
    assert file.generation == 0
    file_of(tmp_path, entry("c"), entry("b", "admin"))
    file.reload()
    assert (file.generation, file.num_refused, names(file.known)) == (1, 0, ["c", "b"])
    assert file.known.of_token(token_of("a")) is None
    c, b = file.known.principals
    assert b.number == number["b"] and c.number not in number.values() and b.roles == {Role.ADMIN}
    file_of(tmp_path, entry("a"))
    file.reload()
    assert file.known.principals[0].number == number["a"], "what it held is its own again"


@pytest.mark.parametrize("content", [b"[[principal]]\nname = 1", b"", None])
def test_a_bad_change_keeps_the_old_ones_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    file, path = file_of(tmp_path, entry("a", "step")), tmp_path / "principals.toml"
    path.unlink() if content is None else path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            file.reload()
    assert (file.generation, file.num_refused, names(file.known)) == (0, 1, ["a"])
    assert [record.getMessage() for record in caplog.records] == ["principals refused, the old ones stay"]
    file_of(tmp_path, entry("b"))
    file.reload()
    assert (file.generation, file.num_refused, names(file.known)) == (1, 1, ["b"])


def test_who_is_alone_is_told_from_who_has_others_beside(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    file = PrincipalsFile(write_principals(path, entry("a", "step")))
    assert [one.is_alone for one in file.known.principals] == [True]
    write_principals(path, entry("a", "step"), entry("b", "step"))
    file.reload()
    assert [one.is_alone for one in file.known.principals] == [False, False]
