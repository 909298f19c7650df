"""A process's place among those of a server over ranks, as torchrun or our launcher tells it in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from deltaline_server import errors

MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Variables of where the ranks meet."""
STORE_FD = "STORE_FD"
"""Of rank 0: the descriptor of a socket that listens there already, where our launcher has opened it."""


class PlaceError(ValueError):
    """The environment tells of a place that can't be; the message is one line."""


@dataclass(frozen=True)
class Place:
    """Which of `world_size` processes this is, and which of the `local_size` on this host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    store_fd: int | None = None

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Self | None:
        """None where the environment tells of no group. Raises PlaceError where it tells of one that can't be."""
        if not all(name in environ for name in ("RANK", "WORLD_SIZE", *MEETING)):
            return None
        world_size = _number(environ, "WORLD_SIZE", 1, 1 << 16)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size, default=world_size)
        rank = _number(environ, "RANK", 0, world_size - 1)
        return cls(
            rank,
            world_size,
            _number(environ, "LOCAL_RANK", 0, local_size - 1, default=rank),
            local_size,
            environ["MASTER_ADDR"],
            _number(environ, "MASTER_PORT", 1, 65535),
            _number(environ, STORE_FD, 0, 1 << 30) if STORE_FD in environ else None,
        )

    def variables(self) -> dict[str, str]:
        """What tells it to a process."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_PORT": self.port,
        }
        if self.store_fd is not None:
            numbers[STORE_FD] = self.store_fd
        return {"MASTER_ADDR": self.address} | {name: str(number) for name, number in numbers.items()}


def _number(environ: Mapping[str, str], name: str, low: int, high: int, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not (text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
        raise PlaceError(f"{name}: expected {low} .. {high}, got {errors.shown(text)}")
    return int(text)
