"""What the package exports, and how its channel is set."""

from __future__ import annotations

import inspect
import types

import deltaline_client
from deltaline_client import (
    Adapters,
    AsyncAdapters,
    AsyncClient,
    AsyncSequence,
    AsyncSnapshot,
    AsyncSnapshots,
    Client,
    Sequence,
    Snapshot,
    Snapshots,
)
from deltaline_client._transport.channels.channel import OPTIONS


def test_the_export_list_is_what_is_public() -> None:
    public = {
        name
        for name, value in vars(deltaline_client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(public) == sorted(deltaline_client.__all__)
    assert len(set(deltaline_client.__all__)) == len(deltaline_client.__all__)


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member)).replace("AsyncS", "S")
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert signatures(Client) == signatures(AsyncClient)
    assert signatures(Sequence) == signatures(AsyncSequence)
    assert signatures(Adapters) == signatures(AsyncAdapters)
    assert signatures(Snapshots) == signatures(AsyncSnapshots)
    assert signatures(Snapshot) == signatures(AsyncSnapshot)
    for kind in (Client, Snapshots, Snapshot):
        assert all(inspect.getdoc(getattr(kind, name)) for name in signatures(kind))


def test_the_channel_never_retries_by_itself() -> None:
    options = dict(OPTIONS)
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.service_config_disable_resolution"] == 1
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 64 * 2**20
    assert options["grpc.keepalive_time_ms"] > 10_000
