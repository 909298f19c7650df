"""What a part of the bench has found: lines of a table, and whether all checks held. Rank 0 prints."""

from __future__ import annotations

from deltaline_server.ranks.group import Group


class Figures:
    """Lines of one part. group: None where one process speaks for itself."""

    def __init__(self, part: str, group: Group | None = None) -> None:
        self._part, self._speaks = part, group is None or group.place.rank == 0
        self.num_wrong = 0

    def tell(self, what: str, value: str, note: str = "") -> None:
        """Print a figure."""
        if self._speaks:
            self._print(what, value, note)

    def check(self, what: str, holds: bool, note: str = "") -> None:
        """Print whether something holds; on every rank where it does not."""
        self.num_wrong += not holds
        if holds:
            self.tell(what, "yes", note)
        else:
            self._print(what, "NO", note)

    def _print(self, what: str, value: str, note: str) -> None:
        print(f"  {self._part:10} {what:58} {value:>14}  {note}", flush=True)
