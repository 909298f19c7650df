"""What the package exports, and how its channel is set."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest

import deltaline_client
from deltaline_client import Adapters, AsyncAdapters, AsyncClient, AsyncSequence, Client, Sequence, _public
from deltaline_client._transport.channel import OPTIONS


def test_the_export_list_is_what_is_public() -> None:
    public = {
        name
        for name, value in vars(_public).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(public) == sorted(_public.__all__)
    assert len(set(_public.__all__)) == len(_public.__all__)


def test_the_package_has_what_it_exports_and_nothing_else() -> None:
    names: dict[str, object] = {}
    exec("from deltaline_client import *", names)
    assert {name: names[name] for name in _public.__all__} == {name: getattr(_public, name) for name in _public.__all__}
    assert set(_public.__all__) <= set(dir(deltaline_client))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = deltaline_client.Nothing


def test_the_package_imports_its_parts_when_they_are_asked_for() -> None:
    code = "import sys, deltaline_client; assert 'grpc' not in sys.modules; deltaline_client.Client; import grpc"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, str]:
        return {
            name: str(inspect.signature(member)).replace("AsyncSequence", "Sequence")
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert signatures(Client) == signatures(AsyncClient)
    assert signatures(Sequence) == signatures(AsyncSequence)
    assert signatures(Adapters) == signatures(AsyncAdapters)
    assert all(inspect.getdoc(getattr(Client, name)) for name in signatures(Client))


def test_the_channel_never_retries_by_itself() -> None:
    options = dict(OPTIONS)
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.service_config_disable_resolution"] == 1
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 64 * 2**20
    assert options["grpc.keepalive_time_ms"] > 10_000
