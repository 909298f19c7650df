"""Who a call is from, judged once for each call, before anything of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace

from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.trust.peer import UID, CallContext, is_local_socket, is_private, proven_by
from deltaline_server.front.trust.principals_file import PrincipalsFile
from deltaline_server.front.trust.roles import EVERY_ROLE, NOBODY, OPEN, ROLES, Role
from deltaline_server.local_socket import is_loopback
from deltaline_server.principal import ANONYMOUS, Principal

_ON_HOST = replace(ANONYMOUS, roles=EVERY_ROLE)
_OFF_HOST = replace(ANONYMOUS, roles=frozenset({Role.STEP, Role.ADAPTER}))
_SCHEME = "bearer "

_current: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """Who the call is from that this task answers. Only a handler that the Interceptor has wrapped may ask."""
    return _current.get()


def check_role(role: Role) -> None:
    """Raise RequestError ROLE_MISSING unless the task's principal has a role, which a part of its call asks for."""
    _check(current_principal(), frozenset({role}))


class Principals:
    """Judges calls: by the file of principals, or as everybody's where there is none."""

    def __init__(self, file: PrincipalsFile | None = None, *, is_on_host: bool = True) -> None:
        """is_on_host: whether only processes of this host reach gRPC's port."""
        self.file = file
        self._anonymous = _ON_HOST if is_on_host else _OFF_HOST

    @property
    def generation(self) -> int:
        """Another one from when calls may be judged otherwise than before."""
        return 0 if self.file is None else self.file.generation

    @property
    def names(self) -> Mapping[int, str]:
        """The names of those that there are, by number."""
        known = [ANONYMOUS] if self.file is None else self.file.known.principals
        return {principal.number: principal.name for principal in known}

    def named(self, name: str) -> Principal | None:
        """A principal of the file by its name; None where there is none, or no file."""
        known = () if self.file is None else self.file.known.principals
        return next((principal for principal in known if principal.name == name), None)

    def number_of(self, name: str) -> int | None:
        """The number of a principal that there is or may come to be; None where there can be none of this name."""
        if self.file is None:
            return ANONYMOUS.number if name == ANONYMOUS.name else None
        return self.file.number_of(name)

    @property
    def num_refused(self) -> int:
        """How often a changed file was wrong."""
        return 0 if self.file is None else self.file.num_refused

    def reload(self) -> None:
        """Read the file again, if it changed."""
        if self.file is not None:
            self.file.reload()

    def admit(self, method: str, context: CallContext) -> Principal | None:
        """Judge a call of a method, by its path; from then on it is the task's. None where nobody need be known.

        Raises RequestError CREDENTIALS_MISSING, CREDENTIALS_UNKNOWN, TOKEN_IN_PLAINTEXT or ROLE_MISSING.
        """
        needed = ROLES.get(method, NOBODY)
        if needed is OPEN:
            return None
        principal = self._judge(context)
        _check(principal, needed)
        _current.set(principal)
        return principal

    def _judge(self, context: CallContext) -> Principal:
        """Who a call is from. A token goes before a certificate. Raises RequestError."""
        if self.file is None:
            is_near = self._anonymous is _ON_HOST or is_local_socket(context.peer())
            return _ON_HOST if is_near else self._anonymous
        known = self.file.known
        headers = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if not headers:
            proven = proven_by(context)
            found = known.of_proven(proven)
            if found is None:
                message = "expected a token, or a client certificate with a name that is known"
                if UID in proven:
                    message = "expected a token, or a user that is known"
                raise RequestError(Reason.CREDENTIALS_MISSING, message)
            return found
        if not is_private(context):
            message = "a token came from another host without TLS: it is no secret any more, replace it"
            raise RequestError(Reason.TOKEN_IN_PLAINTEXT, message)
        token = _token(headers)
        found = None if token is None else known.of_token(token)
        if found is None:
            raise RequestError(Reason.CREDENTIALS_UNKNOWN, "the token is not, or no longer, one that is known")
        return found


def _check(principal: Principal, needed: frozenset[str]) -> None:
    """Raise RequestError ROLE_MISSING unless a principal has one of these roles."""
    if not principal.roles & needed:
        roles = ", ".join(sorted(needed)) or "none"
        message = f"the principal {principal.name} has none of the roles that may do this: {roles}"
        raise RequestError(Reason.ROLE_MISSING, message, metadata={"principal": principal.name, "roles": roles})


def open_principals(path: str | None, host: str) -> Principals:
    """The principals of --principals, None for none, of a server that listens on --host. Raises ConfigError."""
    return Principals(None if path is None else PrincipalsFile(path), is_on_host=is_loopback(host))


def _token(headers: list[str | bytes]) -> str | None:
    """The token of the one `authorization` header; None where it has none."""
    header = headers[0] if len(headers) == 1 else ""
    if isinstance(header, str) and header[: len(_SCHEME)].lower() == _SCHEME:
        return header[len(_SCHEME) :].strip() or None
    return None
