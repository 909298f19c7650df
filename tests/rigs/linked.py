"""What tests of both clients over the local link share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltaline_client import Retry
from deltaline_server.app import Server

HIDDEN = 64
FAST = Retry(initial_backoff_s=0.001, max_backoff_s=0.01)


@dataclass
class Driven:
    """Clients of one kind; `do` finishes what their methods return."""

    make: Callable[..., Any]
    do: Callable[[Any], Any]


def tokens(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


def by_link(server: Server) -> float:
    """Connections of the link that are open."""
    return server.metrics.registry.get_sample_value("deltaline_link_connections") or 0.0


def hidden_link(server: Server) -> Path:
    """Rename the socket, so that clients do not see it, as in another container; its path before."""
    path = Path(server.link.path)
    path.rename(path.with_name("hidden.sock"))
    return path
