"""What the server says of the ports that it listens on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rigs.principals import entry, write_principals

from deltaline_server.config import Config
from deltaline_server.front.link.listener import Listener
from deltaline_server.front.trust.principals import open_principals
from deltaline_server.ports import ways_in

LOCAL = {"uds": "none", "link": "none"}
PAIR = {"tls_cert": "c.pem", "tls_key": "k.pem"}


@pytest.mark.parametrize(
    ("tls", "said"), [({}, "none"), (PAIR, "server"), (PAIR | {"tls_client_ca": "ca.pem"}, "mutual")]
)
def test_what_guards_the_ports_is_said_in_words(tmp_path: Path, tls: Any, said: str) -> None:
    config = Config(random_init="config.json", **tls)
    assert ways_in(config, Listener(None), open_principals(None, config.host)) == LOCAL | {
        "tls": said,
        "principals": "none",
    }
    path = write_principals(tmp_path / "p.toml", entry("a", "step"), entry("b"))
    assert ways_in(config, Listener(None), open_principals(path, config.host)) == LOCAL | {"tls": said, "principals": 2}
