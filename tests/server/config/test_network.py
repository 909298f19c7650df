"""The name under which a server is known."""

from __future__ import annotations

from typing import Any

import pytest

from deltaline_server.config import Config, ConfigError


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "::1"}, ""),
        ({"host": "0.0.0.0", "insecure": True}, ""),
        ({"host": "::", "insecure": True}, ""),
        ({"host": "10.0.0.5", "insecure": True}, "10.0.0.5:7000"),
        ({"host": "fd00::5", "insecure": True}, "[fd00::5]:7000"),
        ({"host": "gpu-3.example", "insecure": True}, "gpu-3.example:7000"),
        ({"advertise": "127.0.0.1"}, "127.0.0.1:7000"),
        ({"host": "0.0.0.0", "insecure": True, "advertise": "gpu-3.example"}, "gpu-3.example:7000"),
        ({"advertise": "gpu-3.example:443"}, "gpu-3.example:443"),
        ({"advertise": "[fd00::5]"}, "[fd00::5]:7000"),
        ({"advertise": "[fd00::5]:443"}, "[fd00::5]:443"),
    ],
)
def test_a_server_is_known_by_what_it_advertises_or_where_it_listens(options: dict[str, Any], name: str) -> None:
    assert Config(random_init="c", **options).name(7000) == name


@pytest.mark.parametrize(
    "name", ["", "fd00::5", "a b", "a:0", "a:65536", "unix:/x", "a:1:2", "ä.example", "a\n", "a" * 254]
)
def test_what_is_no_host_and_port_is_not_advertised(name: str) -> None:
    with pytest.raises(ConfigError, match="--advertise: expected HOST or HOST:PORT, got "):
        Config(random_init="c", advertise=name)
