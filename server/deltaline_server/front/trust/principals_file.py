"""The file of principals: who there is, by what they are known, and what they may do and take."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, TypeVar

from deltaline_server import errors
from deltaline_server.config.option import ConfigError, from_toml
from deltaline_server.front.trust.peer import DNS_NAMES, SPIFFE_ID, UID
from deltaline_server.front.trust.roles import Role
from deltaline_server.log import event
from deltaline_server.principal import ANONYMOUS, SHARED, Principal, Quotas

MAX_FILE_BYTES = 1 << 20
MAX_PRINCIPALS = 256
# One that goes out of use and the next.
MAX_TOKENS = 2
MAX_QUOTA = 2**50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# What a script that found no token makes of it.
_EMPTY = sha256().hexdigest()
_KEYS = ("name", "tokens", "identities", "uids", "roles", "quotas")
# Names that mean something else in metrics and logs.
_RESERVED = (ANONYMOUS.name, SHARED.name, "other")

_log = logging.getLogger(__name__)
T = TypeVar("T", str, int)


@dataclass(frozen=True)
class Known:
    """What a file says. digests: SHA-256 of tokens."""

    principals: Sequence[Principal]
    digests: Mapping[bytes, Principal] = field(repr=False)
    identities: Mapping[bytes, Principal]
    """By a certificate's SPIFFE id or DNS name."""
    uids: Mapping[bytes, Principal]
    _seen: dict[bytes, Principal] = field(default_factory=dict, repr=False)
    """Of the digests, those that came: they need not be looked for again."""

    def of_token(self, token: str) -> Principal | None:
        """Whose token it is. Takes as long for one that is wrong from its first byte on as for any other."""
        digest = sha256(token.encode(errors="surrogateescape")).digest()
        found = self._seen.get(digest)
        if found is None:
            for known, principal in self.digests.items():
                if hmac.compare_digest(known, digest):
                    found = self._seen[digest] = principal
        return found

    def of_proven(self, proven: Mapping[str, Iterable[bytes]]) -> Principal | None:
        """Whom a certificate, or a process of this host, is of; nobody where its names are of several."""
        found = [self.identities.get(value) for name in (SPIFFE_ID, DNS_NAMES) for value in proven.get(name, ())]
        found += [self.uids.get(value) for value in proven.get(UID, ())]
        numbers = {principal.number: principal for principal in found if principal is not None}
        return next(iter(numbers.values())) if len(numbers) == 1 else None


class PrincipalsFile:
    """A file that is read again when it changed; one that is wrong changes nothing.

    Attributes: known; generation, how often that changed; num_refused, how often a changed file was wrong.
    """

    def __init__(self, path: str) -> None:
        """Read it. Raises ConfigError."""
        self._path, self._numbers = path, dict[str, int]()
        self.generation = self.num_refused = 0
        try:
            self._content: bytes | None = _read(path)
            self.known = self._parsed(self._content)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--principals: {path}: {_why(error)}") from error

    def number_of(self, name: str) -> int:
        """A name's number, which the file need not have yet: the same for as long as the process lives."""
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def reload(self) -> None:
        """Read it again; what is wrong with it is logged, once."""
        content: bytes | None = None
        try:
            content = _read(self._path)
            if content == self._content:
                return
            self.known = self._parsed(content)
            self.generation += 1
            event(_log, "principals read", count=len(self.known.principals))
        except (OSError, ValueError) as error:
            if content is not None or self._content is not None:
                self.num_refused += 1
                event(_log, "principals refused, the old ones stay", level=logging.ERROR, why=_why(error))
        self._content = content

    def _parsed(self, content: bytes) -> Known:
        """What a file's content says. A name has one number for as long as the process lives. Raises ValueError."""
        try:
            file = tomllib.loads(content.decode())
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        entries = file.pop("principal", [])
        if file or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("expected nothing but tables [[principal]]")
        if not entries:  # as one is that is being written
            raise ValueError("expected at least one table [[principal]]")
        if len(entries) > MAX_PRINCIPALS:
            raise ValueError(f"expected at most {MAX_PRINCIPALS} principals, got {len(entries)}")
        principals: dict[str, Principal] = {}
        by: dict[str, dict[bytes, Principal]] = {"tokens": {}, "identities": {}, "uids": {}}
        for place, entry in enumerate(entries, 1):
            try:
                principal = _principal(entry)
                if principal.name in principals:
                    raise ValueError("name: expected one that no other has")
                number = self.number_of(principal.name)
                principals[principal.name] = principal = Principal(
                    number, principal.name, principal.roles, principal.quotas, is_alone=len(entries) == 1
                )
                for kind, values in _credentials(entry).items():
                    for value in values:
                        if value in by[kind]:
                            raise ValueError(f"{kind}: expected none twice in the file")
                        by[kind][value] = principal
            except ValueError as error:
                raise ValueError(f"principal {place}: {error}") from error
        return Known(list(principals.values()), by["tokens"], by["identities"], by["uids"])


def _principal(entry: Mapping[str, Any]) -> Principal:
    """An entry's principal, without its number. Raises ValueError."""
    unknown = sorted(entry.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"expected the keys {', '.join(_KEYS)}, got {errors.shown(unknown[0])}")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        expected = (
            f"1 to 64 of A-Z a-z 0-9 . _ @ / -, beginning with a letter or digit, and not one of {', '.join(_RESERVED)}"
        )
        raise ValueError(f"name: expected {expected}, got {errors.shown(name)}")
    roles = _list(entry, "roles", str, lambda role: role in set(Role), f"some of {', '.join(Role)}")
    quotas = entry.get("quotas", {})
    options = {option.name: option for option in fields(Quotas)}
    strange = sorted(quotas.keys() - options.keys()) if isinstance(quotas, dict) else [quotas]
    if strange:
        raise ValueError(f"quotas: expected a table with some of {', '.join(options)}, got {errors.shown(strange[0])}")
    given = {key: from_toml(options[key], value, f"quotas: {key}") for key, value in quotas.items()}
    for key, value in given.items():
        if not 0 <= value <= MAX_QUOTA:
            raise ValueError(f"quotas: {key}: expected 0 .. {MAX_QUOTA}, got {errors.shown(value)}")
    return Principal(0, name, frozenset(map(Role, roles)), Quotas(**given) if any(given.values()) else None)


def _credentials(entry: Mapping[str, Any]) -> dict[str, list[bytes]]:
    """By what an entry's principal is known. What is wrong with a token is told without it: it may be one in plain
    text. Raises ValueError."""
    digests = _list(entry, "tokens", str, _DIGEST.fullmatch, "SHA-256 digests of 64 hexadecimal digits", is_shown=False)
    if len(digests) > MAX_TOKENS:
        raise ValueError(f"tokens: expected at most {MAX_TOKENS}, got {len(digests)}")
    if _EMPTY in map(str.lower, digests):
        raise ValueError(f"tokens: expected digests of tokens, got that of an empty one, {_EMPTY}")
    identities = _list(entry, "identities", str, lambda name: 0 < len(name) <= 2048, "SPIFFE ids and DNS names")
    uids = _list(entry, "uids", int, lambda uid: 0 <= uid < 2**32, "numbers of users")
    return {
        "tokens": [bytes.fromhex(digest) for digest in digests],
        "identities": [name.encode() for name in identities],
        "uids": [b"%d" % uid for uid in uids],
    }


def _list(
    entry: Mapping[str, Any],
    key: str,
    kind: type[T],
    is_good: Callable[[T], object],
    expected: str,
    *,
    is_shown: bool = True,
) -> list[T]:
    """A list of an entry, empty where there is none. Raises ValueError."""
    values = entry.get(key, [])
    if not isinstance(values, list) or not all(type(value) is kind and is_good(value) for value in values):
        got = f", got {errors.shown(values)}" if is_shown else ""
        raise ValueError(f"{key}: expected a list of {expected}{got}")
    return values


def _read(path: str) -> bytes:
    """The content of a regular file. Raises OSError, ValueError."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("expected a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"expected at most {MAX_FILE_BYTES} bytes")
    return content


def _at_once(path: str, flags: int) -> int:
    """Open a file; a pipe's other end is not waited for. Raises OSError."""
    return os.open(path, flags | os.O_NONBLOCK)


def _why(error: Exception) -> str:
    return (error.strerror or "it can't be read") if isinstance(error, OSError) else str(error)
