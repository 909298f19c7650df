"""Memory that is another's again once it is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Lent(NamedTuple):
    """Bytes whose owner writes to them again once they are given back, from the event loop."""

    content: memoryview
    give_back: Callable[[], None]
