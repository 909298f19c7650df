"""Where the steps of a prefill row leave snapshots: the caller's places, and how the row is cut for them.

A server leaves states behind multiples of `grid` tokens of a step, and at any step's end. So a place that is not on the
grid of its step is made the end of one, and the next step's grid begins there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from deltaline.v1 import prefix_pb2
from deltaline_client._exceptions import InvalidWaypoint
from deltaline_client._prefixes import Waypoints
from deltaline_client._seconds import milliseconds

# Places of one step.
MOST = 4096


@dataclass(frozen=True)
class Places:
    """Those of one row. begin: position of its first token. ends: in tokens of the row, increasing."""

    waypoints: Waypoints
    begin: int
    num_tokens: int
    ends: tuple[int, ...]
    grid: int

    @classmethod
    def of(cls, waypoints: Waypoints, begin: int, num_tokens: int, grid: int) -> Places:
        """The places of a row. Raises InvalidWaypoint where the server leaves no states (grid 0)."""
        if not grid:
            raise InvalidWaypoint("waypoints: the server leaves no states on the way of a prefill")
        ends = tuple(position - begin for position in waypoints.positions(begin, begin + num_tokens))
        return cls(waypoints, begin, num_tokens, ends, grid)

    def cut(self, start: int, most: int) -> int:
        """How many tokens the step from `start` has, at most `most`: each place in it is on its grid, or its end."""
        if start + most < self.num_tokens:
            most = most // self.grid * self.grid or most  # so that the next step has the same grid
        inside = self._inside(start, most)[:MOST]
        off_grid = next((end for end in inside if (end - start) % self.grid), None)
        if off_grid is not None:
            return off_grid - start
        return inside[-1] - start if len(inside) == MOST else most

    def message(self, row: int, start: int, count: int) -> prefix_pb2.Waypoints | None:
        """What a request says of its row with the tokens from `start` on; None where that leaves no state."""
        inside, waypoints = self._inside(start, count), self.waypoints
        if not inside:
            return None
        tokens = [end - start for end in inside]
        at_end = tokens[-1] % self.grid != 0
        prefix = None
        if waypoints.prefix is not None:
            prefix = waypoints.prefix.message(self.begin + end for end in inside)
        return prefix_pb2.Waypoints(
            row=row,
            tokens=tokens[: len(tokens) - at_end],
            at_end=at_end,
            lease_ms=milliseconds("lease_s", waypoints.lease_s),
            pinned=waypoints.pinned,
            prefix=prefix,
        )

    def _inside(self, start: int, count: int) -> tuple[int, ...]:
        return self.ends[bisect_right(self.ends, start) : bisect_right(self.ends, start + count)]
