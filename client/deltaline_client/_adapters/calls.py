"""The adapters of a server: load, unload, list."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline_client._adapters.types import AdapterList, AdapterState, LoadedAdapter
from deltaline_client._adapters.upload import Progress, Source, Upload, files_in, files_of
from deltaline_client._exceptions import AdapterInUse, AdapterUnknown, DeltalineError, TransportError
from deltaline_client._seconds import MAX_SECONDS
from deltaline_client._state import ClientState, info, retried
from deltaline_client._transport.flow import Flow, Sleep, call
from deltaline_client._transport.methods import LIST_ADAPTERS, LOAD_ADAPTER, UNLOAD_ADAPTER
from deltaline_client._transport.retry import is_retryable

# Over the loopback on two cores 620 MiB/s; with 64 and 256 KiB 255 and 480, with 2 MiB no more.
CHUNK_BYTES = 1 << 20


class AdaptersRecord:
    """The adapters of a client's server."""

    def __init__(self, client: ClientState) -> None:
        self._client = client

    def _run(self, flow: Flow[Any]) -> Any:
        return self._client._run(flow)


def load(
    adapters: AdaptersRecord,
    name: str,
    path: str | os.PathLike[str] | None = None,
    *,
    config: bytes | None = None,
    tensors: bytes | bytearray | memoryview | None = None,
    pinned: bool = False,
    shared: bool = False,
    progress: Progress | None = None,
    waiting: Callable[[DeltalineError], object] | None = None,
    timeout_s: float | None = None,
) -> Flow[LoadedAdapter]:
    """Load an adapter under a name: that of the server's folder, or one that is sent.

    Sent again by itself: the same content under the same name is loaded once.

    Args: path, a directory of this machine as PEFT writes it (adapter_config.json, adapter_model.safetensors), read
    while it is sent; or config and tensors, the bytes of these two files, left alone meanwhile; with none of them the
    server reads its own. pinned, stay when memory is short; the last load of a name counts. shared, for
    everybody, which takes the role admin; else for this client's principal alone. progress, called as
    progress(sent_bytes, total_bytes) from the thread that reads. waiting, called with a try's error before the wait for
    the next try. timeout_s, with all tries, default the client's.
    Raises InvalidAdapter, naming what can't be taken; AdapterExists; AdapterBytesExhausted when there is not enough
    memory in time; AdaptersOff; OSError and ValueError for files that can't be read here; what `progress`
    and `waiting` raise.
    """
    client = adapters._client
    source = _source(path, config, tensors)
    chunk_bytes = 0
    if source is not None:
        chunk_bytes = min(CHUNK_BYTES, (yield from info(client)).inline_limit_bytes)
    # No attempt is cut short to make another: that would send all of it again.
    attempts = client._attempts(timeout_s, replace(client._retry, attempt_timeout_s=MAX_SECONDS))
    while True:
        upload = Upload(source, chunk_bytes, progress)
        messages = upload.messages(name, pinned, shared)
        try:
            response = yield from call(LOAD_ADAPTER, messages, attempts.next_timeout_s())
            if upload.error is not None:
                raise upload.error
            return LoadedAdapter.from_proto(response)
        except DeltalineError as error:
            if upload.error is not None:
                raise upload.error from None
            delay_s = attempts.delay_s(error.retry_after_s) if is_retryable(error) else None
            if delay_s is None:
                raise
            if waiting is not None:
                waiting(error)
        finally:
            upload.is_over = True
            with suppress(ValueError):  # a thread is reading just now, and closes the file when it is done
                messages.close()
        yield Sleep(delay_s)


def unload(adapters: AdaptersRecord, name: str, *, drain: bool = False, shared: bool = False) -> Flow[int]:
    """Free the name of an adapter; returns how many open sequences still use the adapter, 0 when it is gone.

    Args: drain, whether those go on with it, and it goes after the last of them; no new sequence gets it. shared, one
    that is everybody's, which takes the role admin.
    Raises AdapterInUse when there are any and drain is False, at once; AdapterUnknown for a name that nothing has.
    """
    attempts = adapters._client._attempts()
    request = pb.UnloadAdapterRequest(name=name, drain=drain, shared=shared)
    is_in_doubt = False
    while True:
        try:
            return (yield from call(UNLOAD_ADAPTER, request, attempts.next_timeout_s())).sequences
        except AdapterUnknown:
            if not is_in_doubt:
                raise
            break  # a try whose answer was lost has freed it
        except DeltalineError as error:
            # Waiting may never help: its sequences may stay open. The caller can drain them instead.
            is_final = isinstance(error, AdapterInUse) or not is_retryable(error)
            delay_s = None if is_final else attempts.delay_s(error.retry_after_s)
            if delay_s is None:
                raise
            is_in_doubt = is_in_doubt or isinstance(error, TransportError)
        yield Sleep(delay_s)
    listed = (yield from list_adapters(adapters)).adapters
    wanted = name, shared, AdapterState.DRAINING
    return sum(one.sequences for one in listed if (one.name, one.shared, one.state) == wanted)


def list_adapters(adapters: AdaptersRecord) -> Flow[AdapterList]:
    """Which adapters the server holds, by name, and how much room it has for them."""
    return AdapterList.from_proto((yield from retried(adapters._client, LIST_ADAPTERS, pb.ListAdaptersRequest())))


def _source(
    path: str | os.PathLike[str] | None, config: bytes | None, tensors: bytes | bytearray | memoryview | None
) -> Source | None:
    """Where the files are, None for on the server. Raises ValueError."""
    if (config is None) != (tensors is None):
        raise ValueError("config, tensors: expected both or none, got one of them")
    if config is None or tensors is None:
        return None if path is None else partial(files_in, Path(path))
    if path is not None:
        raise ValueError("path: expected none beside config and tensors, got one")
    return partial(files_of, config, memoryview(tensors).cast("B"))
