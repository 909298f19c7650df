"""Sequences that name an adapter when they are opened, and what a client says of adapters. Needs no real server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from deltaline.v1 import adapter_service_pb2 as pb
from deltaline_client import Adapter, AdapterList, AdapterState, AdapterUnknown, Prefix, ProtocolError

HASH = b"\x01" * 32


def test_sequences_open_with_an_adapter_and_keep_it(server: Any, driven: Any) -> None:
    server.adapters["french"] = HASH
    server.lose("OpenSequences", grpc.StatusCode.UNAVAILABLE)
    [one, other] = driven.do(driven.client.open_many(2, adapter="french"))
    assert [request.adapter for request in server.requests["OpenSequences"]] == ["french", "french"]
    for sequence in (one, other):
        assert (sequence.adapter, sequence.adapter_hash) == ("french", HASH)
        assert repr(sequence).endswith(f"(handle={sequence.handle:#x}, position=0, adapter='french')")
    [description] = driven.do(driven.client.describe([one]))
    assert (description.adapter, description.adapter_hash) == ("french", HASH)


def test_a_sequence_without_an_adapter_says_nothing_of_one(server: Any, driven: Any) -> None:
    sequence = driven.do(driven.client.open())
    assert (sequence.adapter, sequence.adapter_hash) == (None, b"")
    assert repr(sequence).endswith(f"(handle={sequence.handle:#x}, position=0)")
    [description] = driven.do(driven.client.describe([sequence]))
    assert (description.adapter, description.adapter_hash) == (None, b"")


def test_an_adapter_that_is_not_loaded(server: Any, driven: Any) -> None:
    with pytest.raises(AdapterUnknown):
        driven.do(driven.client.open(adapter="french"))
    assert len(server.requests["OpenSequences"]) == 1
    with pytest.raises(ValueError, match="adapter: expected a name, or None for none, got an empty name"):
        driven.do(driven.client.open(adapter=""))
    with pytest.raises(TypeError, match="adapter: expected a name, or None for none, got int"):
        driven.do(driven.client.open(adapter=3))
    with pytest.raises(TypeError, match="adapter: expected a name, or None for none, got int"):
        driven.do(driven.client.snapshots.find(Prefix.of_tokens([1]), adapter=3))
    with pytest.raises(TypeError, match="target: expected a name, or None for none, got int"):
        driven.do(driven.client.drain(target=3))
    assert len(server.requests["OpenSequences"]) == 1


def test_a_server_that_drops_the_adapter_is_noticed(server: Any, driven: Any) -> None:
    server.adapters["french"] = b""  # as one answers that does not know the field
    with pytest.raises(ProtocolError, match="not opened the sequences with the adapter"):
        driven.do(driven.client.open(adapter="french"))
    [closed] = server.requests["CloseSequences"]
    assert len(closed.sequence) == 1, "it would keep its state until its lease is over"


def test_an_adapter_is_shown_on_a_line() -> None:
    message = pb.Adapter(name="french", content_hash=bytes(range(32)), rank=8, state=pb.ADAPTER_STATE_RESIDENT)
    adapter = Adapter.from_proto(message)
    shown = repr(adapter)
    assert shown.startswith("Adapter(name='french', content_hash=0001020304050607, rank=8, size_bytes=0, state=<")
    assert shown.endswith("pinned=False, sequences=0, modules_elsewhere=0, shared=False)")
    assert repr(AdapterList((adapter,), 1, 2, 3, 4)).startswith(f"AdapterList(adapters=({shown},), used_bytes=1, ")


def test_a_state_of_a_later_server_is_an_error_of_the_protocol() -> None:
    message = pb.Adapter(name="french", state=pb.ADAPTER_STATE_DRAINING)
    assert Adapter.from_proto(message).state is AdapterState.DRAINING
    for state in (pb.ADAPTER_STATE_UNSPECIFIED, 9):
        with pytest.raises(ProtocolError, match="state of an adapter"):
            Adapter.from_proto(pb.Adapter(name="french", state=state))  # type: ignore[arg-type]
