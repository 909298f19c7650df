"""The client of deltaline: sequences that live on a server, as numpy in and numpy out.

    from deltaline_client import Client

    with Client("localhost:50051") as client, client.open() as sequence:
        outputs = sequence.prefill(hidden)

Every call is sent again by itself when that is safe and may help (see Retry). It is always safe: a step is applied once
or not at all. Knows the protocol; not models, not tokens, not torch (tensors are taken when the caller brings them).

What is exported is imported when it is first asked for: `deltaline health`, which probes call again and again, needs a
third of the time without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltaline_client._public import *  # noqa: F403 - its own list is what counts


def __getattr__(name: str) -> Any:
    """Import what the package exports. Raises AttributeError for any other name."""
    if not name.startswith("_") or name == "__all__":
        public = import_module("deltaline_client._public")
        globals().update({exported: getattr(public, exported) for exported in ("__all__", *public.__all__)})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
