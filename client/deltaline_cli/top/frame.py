"""What a frame of `deltaline top` shows."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_cli.top.rates import Rates
from deltaline_client import AdapterList, ServerInfo, ServerLoad


@dataclass(frozen=True)
class Frame:
    """All that a frame shows.

    rates: None where no metrics are read, or why they can't be. adapters: None where the server keeps none. error: why
    the server could not be asked just now; then the rest is what it said last.
    """

    address: str
    info: ServerInfo
    load: ServerLoad
    adapters: AdapterList | None
    rates: Rates | str | None
    error: str = ""
