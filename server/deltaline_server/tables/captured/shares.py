"""How many snapshots, and lines for them, each principal may hold beside the others."""

from __future__ import annotations

from collections.abc import Iterable

from deltaline_server.errors import Reason
from deltaline_server.principal import Principal, check_share
from deltaline_server.tables.captured.device import DeviceTier
from deltaline_server.tables.captured.held import Held
from deltaline_server.tables.captured.state import CapturedState
from deltaline_server.tables.captured.waiting import Waiting
from deltaline_server.tables.ledger import Slots
from deltaline_server.tables.sequences import SequenceTable


class Shares:
    """Refuses what would be more than a principal's quota, or than it leaves others. All methods belong to the table's
    thread."""

    def __init__(self, table: SequenceTable, device: DeviceTier, held: Held) -> None:
        self._table, self._device, self._held = table, device, held
        self._waiting = Waiting(table, device.room)

    def check(self, count: int, principal: Principal, is_pinned: bool, num_under_way: int = 0) -> None:
        """Both of `check_quota` and `check_pinned`; num_under_way: of the states under way, those that the principal
        has."""
        self.check_quota(count, principal, num_under_way)
        self.check_pinned(count, principal, is_pinned, num_under_way)

    def check_quota(self, count: int, principal: Principal, num_under_way: int = 0) -> None:
        """Raise RequestError QUOTA_EXCEEDED where so many more are too many."""
        if principal.quotas is not None:
            principal.quotas.check("snapshots", self._held.num_of(principal) + num_under_way, count)

    def check_pinned(self, count: int, principal: Principal, is_pinned: bool, num_under_way: int = 0) -> None:
        """Raise RequestError NO_SNAPSHOT_LINES where so many more that do not give way would be too many."""
        if is_pinned or num_under_way:
            self._check_lines(count, principal, num_under_way)

    def check_create(self, slots: Slots, principal: Principal, is_pinned: bool) -> None:
        """`check` of snapshots of slots; of unpinned ones also NO_SNAPSHOT_LINES, as their sequences may keep the lines
        once the snapshots are gone."""
        self.check(len(slots), principal, is_pinned)
        if not is_pinned:
            self._check_lines(self._waiting.num_more_of_create(slots), principal)

    def check_fork(self, slots: Slots, principal: Principal) -> None:
        """The same of the lines that a fork of slots keeps until its children step."""
        self._check_lines(self._waiting.num_more_of_fork(slots), principal)

    def check_restore(self, states: Iterable[CapturedState], principal: Principal) -> None:
        """The same of the lines that sequences keep which begin from these states."""
        self._check_lines(self._waiting.num_more_of_restore(states), principal)

    def _check_lines(self, count: int, principal: Principal, num_under_way: int = 0) -> None:
        """Raise RequestError NO_SNAPSHOT_LINES where what does not give way, pinned ones, states under way and lines
        that sequences wait on, would be more than is left to others."""
        if count and principal.number and not principal.is_alone:
            pinned, waiting = self._device.num_pinned, self._waiting
            held = pinned[principal.number] + num_under_way + waiting.num_lines(principal.number)
            kept = sum(pinned.values()) + len(self._device.under_way) + waiting.num_lines()
            free, others = self._table.lines.snapshot_lines - kept, count - 1  # beside the last
            what = "pinned snapshots, states under way and lines of sequences that have yet to step"
            may_fit = count == 1 or 2 * count <= self._table.lines.snapshot_lines  # once nobody holds any
            retry_after_s = 0.02 if may_fit else None
            check_share(held + others, 1, free - others, what, Reason.NO_SNAPSHOT_LINES, retry_after_s)
