"""A file of principals, and their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from deltaline_server.front.trust.principals import Principals

Entry = Mapping[str, Any]


def token_of(name: str) -> str:
    """The token of a principal, in plain text."""
    return f"token-of-{name}"


def digest_of(token: str) -> str:
    """What the file has of a token."""
    return sha256(token.encode()).hexdigest()


def entry(name: str, *roles: str, tokens: Sequence[str] | None = None, **more: Any) -> dict[str, Any]:
    """A principal with the roles; tokens: in plain text, by default its one."""
    made = {"name": name, "roles": list(roles), "tokens": [digest_of(t) for t in (token_of(name),)]}
    return made | ({} if tokens is None else {"tokens": list(map(digest_of, tokens))}) | more


def write_principals(path: Path, *entries: Entry) -> str:
    """Write a file of these principals, at once; return its path."""
    beside = path.with_suffix(".new")
    beside.write_text("\n".join(_toml(one) for one in entries))
    beside.rename(path)
    return str(path)


def headers(name: str, token: str | None = None) -> tuple[tuple[str, str]]:
    """The metadata of a principal's call."""
    return (("authorization", f"Bearer {token_of(name) if token is None else token}"),)


def as_anonymous() -> None:
    """Let handlers that this task calls itself take it for a call of everybody's."""
    context: Any = None
    Principals().admit("/deltaline.v1.AdminService/GetServerInfo", context)


def _toml(one: Entry) -> str:
    tables = [f"[principal.{key}]\n" + _lines(value) for key, value in one.items() if isinstance(value, dict)]
    plain = {key: value for key, value in one.items() if not isinstance(value, dict)}
    return "\n".join(("[[principal]]", _lines(plain), *tables))


def _lines(values: Entry) -> str:
    """JSON's texts, numbers and lists are TOML's too."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
