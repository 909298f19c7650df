"""Servers that sequences may be moved to: which there are, how this one proves to them who it is, and what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from deltaline import wire
from deltaline.tls import Tls, channel_of
from deltaline.v1 import admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline.v1.admin_service_pb2_grpc import AdminServiceStub
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline_server.config import Config
from deltaline_server.errors import Code, Reason, RequestError
from deltaline_server.snapshots.stream import PIECE_BYTES
from deltaline_server.tables.moved import Owner

# How long a server may take to say who it is, to take a message or open what came, and for all of a sequence.
REACH_S, PAUSE_S, WHOLE_S = 10.0, 30.0, 600.0
_DETAILS = "grpc-status-details-bin"
_IMPORT = "/deltaline.v1.StateService/ImportState"
# What such an answer is about is between the two servers.
_NOT_LET_IN = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)

# Nobody but this module sends anything again.
_OPTIONS = (("grpc.enable_retries", 0), ("grpc.service_config_disable_resolution", 1))

Metadata: TypeAlias = Sequence[tuple[str, str]]


class Peer:
    """A server that was reached. address: where; server_epoch: of its process; page_tokens: of its pages, 0 without."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, info: admin_service_pb2.GetServerInfoResponse, metadata: Metadata
    ) -> None:
        """info: what it says of itself. metadata: of every call."""
        self.address, self.server_epoch, self.page_tokens = address, info.server_epoch, info.kv_page_tokens
        self.chunk_bytes, self._metadata = max(1, min(info.inline_limit_bytes, PIECE_BYTES)), metadata
        answer = state_service_pb2.ImportStateResponse.FromString
        self._import: Any = channel.stream_unary(_IMPORT, response_deserializer=answer)
        self._layer: Any = LayerServiceStub(channel)

    async def open(self, chunks: AsyncIterator[bytes], request_id: bytes, lease_ms: int) -> Owner:
        """Let a sequence go on there, by its file in messages (`chunk_of`) of at most `chunk_bytes` of it each, for its
        principal, under a handle that nobody else is told.

        Raises RequestError with what the server says; MOVE_FAILED where it says nothing, and may have opened it.
        """
        first = state_service_pb2.ImportStateRequest(
            request_id=request_id, lease_ms=lease_ms, sequence=True, keep_owner=True
        )
        call = self._import(metadata=self._metadata, timeout=WHOLE_S)
        try:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it has answered already
                await call.write(first.SerializeToString())
                async for chunk in chunks:
                    async with asyncio.timeout(PAUSE_S):
                        await call.write(chunk)
                await call.done_writing()
            async with asyncio.timeout(PAUSE_S):
                opened = await call
        except grpc.aio.AioRpcError as error:
            raise _said(error) from error
        except TimeoutError as error:
            raise no_answer(f"within {PAUSE_S:g} seconds") from error
        finally:
            call.cancel()
        return Owner(opened.server or self.address, opened.server_epoch, opened.sequence.sequence)

    async def close(self, owner: Owner) -> None:
        """End a sequence that was opened there, which nobody was told of, if this server may: else its lease does."""
        request = layer_service_pb2.CloseSequencesRequest(server_epoch=owner.server_epoch, sequence=[owner.handle])
        with suppress(grpc.aio.AioRpcError):
            await self._layer.CloseSequences(request, metadata=self._metadata, timeout=REACH_S)


def chunk_of(piece: memoryview) -> bytes:
    """The message of an import that has a piece of a file, which is copied once."""
    return b"".join((wire.field_head(state_service_pb2.ImportStateRequest.CHUNK_FIELD_NUMBER, len(piece)), piece))


class Peers:
    """The servers that sequences may be moved to, and no others."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None = None, token_file: str | None = None) -> None:
        """addresses: HOST:PORT of each. tls: who they have to prove to be, and this server's own certificate; None for
        no TLS. token_file: of the token that they know this server by. Files are read whenever one is reached."""
        self._addresses, self._tls, self._token_file = frozenset(addresses), tls, token_file

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
            raise _target_refused("expected one of the servers that this one may move sequences to")
        try:
            metadata, channel = self._metadata(), channel_of(grpc.aio, address, self._tls, _OPTIONS)
        except (OSError, ValueError) as error:
            raise _target_refused("this server's certificates, or its token, can't be read") from error
        async with channel:
            admin: Any = AdminServiceStub(channel)
            try:
                request = admin_service_pb2.GetServerInfoRequest()
                info = await admin.GetServerInfo(request, metadata=metadata, timeout=REACH_S)
            except grpc.aio.AioRpcError as error:
                raise _unreached(error) from error
            if info.server_epoch == own_epoch:
                raise _target_refused("it is this server")
            yield Peer(channel, address, info, metadata)

    def _metadata(self) -> Metadata:
        if self._token_file is None:
            return ()
        token = Path(self._token_file).read_text(encoding="utf-8").strip()
        if not (token and token.isascii() and token.isprintable()):
            raise ValueError("expected a token")
        return (("authorization", f"Bearer {token}"),)


def _unreached(error: grpc.aio.AioRpcError) -> RequestError:
    """What is told of a server that did not say who it is."""
    if error.code().value[0] in _NOT_LET_IN:
        return _target_refused("it does not let this server in")
    return _target_refused("it can't be reached, or does not prove who it is")


def _target_refused(why: str) -> RequestError:
    return RequestError(Reason.MOVE_TARGET_REFUSED, f"target: {why}")


def no_answer(how: str) -> RequestError:
    """What is told of a sequence that stays, since the target did not say that it has it."""
    message = f"the target did not answer {how}; the sequence stays here"
    return RequestError(Reason.MOVE_FAILED, message, retry_after_s=1.0)


def _said(error: grpc.aio.AioRpcError) -> RequestError:
    """What a server has said of a sequence; where it said nothing, or has a bug, that it did not answer."""
    status, info, delay = status_pb2.Status(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            with suppress(DecodeError):
                status = status_pb2.Status.FromString(value)
    for detail in status.details:
        with suppress(DecodeError):
            if not detail.Unpack(info):
                detail.Unpack(delay)
    reason = Reason.__members__.get(info.reason)
    if reason is None or reason is Reason.BUG:
        return no_answer("as it should")
    if reason.code in _NOT_LET_IN:
        return _target_refused("it does not let this server in")
    retry_after_s = delay.retry_delay.ToNanoseconds() / 1e9 or None
    return RequestError(reason, f"the target: {error.details()}", retry_after_s=retry_after_s)
