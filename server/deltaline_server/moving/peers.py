"""Servers that sequences may be moved to: which there are, how this one proves to them who it is, and what they say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from deltaline import link, wire
from deltaline.tls import Tls, channel_of
from deltaline.v1 import admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline_server.config import Config
from deltaline_server.errors import Code, Reason, RequestError, shown
from deltaline_server.moving.ways import PAUSE_S, CallError, GrpcWay, LinkWay, Message, Metadata, Way
from deltaline_server.tables.moved import Owner

# How long a server may take to say who it is, and for all of a sequence.
REACH_S, WHOLE_S = 10.0, 600.0
_INFO = "/deltaline.v1.AdminService/GetServerInfo"
_IMPORT = "/deltaline.v1.StateService/ImportState"
_CLOSE = "/deltaline.v1.LayerService/CloseSequences"
# What such an answer is about is between the two servers.
_NOT_LET_IN = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
_KEPT_OUT = "does not let this server in"
_UNREACHED = "can't be reached, or does not prove who it is"

# Nobody but this module sends anything again.
_OPTIONS = (("grpc.enable_retries", 0), ("grpc.service_config_disable_resolution", 1))


class Peer:
    """A server that was reached. address: where; server_epoch: of its process; page_tokens: of its pages, 0 without."""

    def __init__(self, way: Way, address: str, info: admin_service_pb2.GetServerInfoResponse) -> None:
        """info: what it says of itself."""
        self.address, self.server_epoch, self.page_tokens = address, info.server_epoch, info.kv_page_tokens
        self._inline_bytes, self._way = max(1, info.inline_limit_bytes), way

    async def open(self, pieces: AsyncIterator[memoryview], request_id: bytes, lease_ms: int) -> Owner:
        """Let a sequence go on there, by its file in pieces, each of which may change once the next is asked for, for
        its principal, under a handle that nobody else is told.

        Raises RequestError with what the server says; MOVE_FAILED where it says nothing, and may have opened it.
        """
        first = state_service_pb2.ImportStateRequest(
            request_id=request_id, lease_ms=lease_ms, sequence=True, keep_owner=True
        )
        try:
            async with aclosing(self._messages(first, pieces)) as messages:
                answer = await self._way.upload(_IMPORT, messages, WHOLE_S)
        except CallError as error:
            raise _said(error.status) from error
        except TimeoutError as error:
            raise no_answer(f"within {PAUSE_S:g} seconds") from error
        opened = state_service_pb2.ImportStateResponse.FromString(answer)
        return Owner(opened.server or self.address, opened.server_epoch, opened.sequence.sequence)

    async def close(self, owner: Owner) -> None:
        """End a sequence that was opened there, which nobody was told of, if this server may: else its lease does."""
        request = layer_service_pb2.CloseSequencesRequest(server_epoch=owner.server_epoch, sequence=[owner.handle])
        with suppress(CallError, TimeoutError):
            await self._way.call(_CLOSE, request.SerializeToString(), REACH_S)

    async def _messages(
        self, first: state_service_pb2.ImportStateRequest, pieces: AsyncIterator[memoryview]
    ) -> AsyncGenerator[Sequence[Message], None]:
        """Of an import, those of a piece together: a chunk of it is a message's only field, and not copied here."""
        yield [(first.SerializeToString(),)]
        field = state_service_pb2.ImportStateRequest.CHUNK_FIELD_NUMBER
        async for piece in pieces:
            size = min(self._inline_bytes, self._way.chunk_bytes)
            chunks = (piece[at : at + size] for at in range(0, len(piece), size))
            yield [(wire.field_head(field, len(chunk)), chunk) for chunk in chunks]


class Peers:
    """The servers that sequences may be moved to, and no others."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None, token_file: str | None) -> None:
        """addresses: HOST:PORT of each, or link:PATH of one on this host. tls: who they have to prove to be, and this
        server's own certificate; None for no TLS. token_file: of the token that they know this server by. Files are
        read whenever one is reached."""
        self._addresses, self._tls, self._token_file = frozenset(addresses), tls, token_file
        # They stay: a link's memory takes as long to make as some tens of MB take to send.
        self._links: dict[str, LinkWay] = {}

    @classmethod
    def of(cls, config: Config) -> Peers:
        """Those of a server's options: with TLS where it has a certificate, which is the one that it shows them."""
        tls = None
        if config.tls_cert is not None:
            tls = Tls(config.move_ca or config.tls_client_ca, config.tls_cert, config.tls_key)
        return cls(config.peers, tls, config.move_token_file)

    @asynccontextmanager
    async def reach(self, address: str, own_epoch: int) -> AsyncIterator[Peer]:
        """A server, which has said who it is. Raises RequestError MOVE_TARGET_REFUSED for one that is not listed, to
        which nothing is sent; does not prove who it is; lets this one not in; or is this one, by its epoch."""
        if address not in self._addresses:
            raise _target_refused(f"expected one of this server's --move-peers, got {shown(address)}")
        async with AsyncExitStack() as held:
            way = await self._way(address, held)
            try:
                answer = await way.call(_INFO, b"", REACH_S)
            except (CallError, TimeoutError) as error:
                is_let_in = not isinstance(error, CallError) or error.status.code not in _NOT_LET_IN
                raise _target_refused(f"{address} {_UNREACHED if is_let_in else _KEPT_OUT}") from error
            info = admin_service_pb2.GetServerInfoResponse.FromString(answer)
            if info.server_epoch == own_epoch:
                raise _target_refused("it is this server")
            yield Peer(way, address, info)

    async def _way(self, address: str, held: AsyncExitStack) -> Way:
        """The way to an address, which is held as long as that, or stays. Raises RequestError MOVE_TARGET_REFUSED."""
        is_link = address.startswith(link.SCHEME)
        try:
            metadata = self._metadata()
            channel = None if is_link else channel_of(grpc.aio, address, self._tls, _OPTIONS)
        except (OSError, ValueError) as error:
            raise _target_refused("this server's certificates, or its token, can't be read") from error
        if channel is not None:
            return GrpcWay(await held.enter_async_context(channel), metadata)
        way = self._links.setdefault(address, LinkWay(address.removeprefix(link.SCHEME)))
        way.metadata = metadata
        try:
            await way.connect()
        except (OSError, ValueError) as error:
            raise _target_refused(f"{address} {_UNREACHED}") from error
        return way

    def close(self) -> None:
        """End what stays of the ways."""
        for way in self._links.values():
            way.close()

    def _metadata(self) -> Metadata:
        if self._token_file is None:
            return ()
        token = Path(self._token_file).read_text(encoding="utf-8").strip()
        if not (token and token.isascii() and token.isprintable()):
            raise ValueError("expected a token")
        return (("authorization", f"Bearer {token}"),)


def _target_refused(why: str) -> RequestError:
    return RequestError(Reason.MOVE_TARGET_REFUSED, f"target: {why}")


def no_answer(how: str) -> RequestError:
    """What is told of a sequence that stays, since the target did not say that it has it."""
    message = f"the target did not answer {how}; the sequence stays here"
    return RequestError(Reason.MOVE_FAILED, message, retry_after_s=1.0)


def _said(status: status_pb2.Status) -> RequestError:
    """What a server has said of a sequence; where it gave no reason of ours, or has a bug, that it did not answer."""
    info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        with suppress(DecodeError):
            if not detail.Unpack(info):
                detail.Unpack(delay)
    reason = Reason.__members__.get(info.reason)
    if reason is None or reason is Reason.BUG:
        return no_answer(": ".join(filter(None, ("as it should", status.message))))
    if reason.code in _NOT_LET_IN:
        return _target_refused(f"it {_KEPT_OUT}")
    retry_after_s = delay.retry_delay.ToNanoseconds() / 1e9 or None
    return RequestError(reason, f"the target: {status.message}", retry_after_s=retry_after_s)
