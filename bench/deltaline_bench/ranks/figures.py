"""What a part of the bench has found: lines of a table, and whether all checks held. Rank 0 prints."""

from __future__ import annotations

import sys

from deltaline_server.ranks.group import Group


class Figures:
    """Lines of one part."""

    def __init__(self, part: str, group: Group) -> None:
        self._part, self._speaks = part, group.place.rank == 0
        self.num_wrong = 0

    def tell(self, what: str, value: str, note: str = "") -> None:
        """Print a figure."""
        if self._speaks:
            print(f"  {self._part:10} {what:58} {value:>14}  {note}", flush=True)

    def check(self, what: str, holds: bool, note: str = "") -> None:
        """Print whether something holds; on every rank where it does not."""
        self.num_wrong += not holds
        if holds:
            self.tell(what, "yes", note)
        else:
            print(f"  {self._part:10} {what:58} {'NO':>14}  {note}", file=sys.stdout, flush=True)
