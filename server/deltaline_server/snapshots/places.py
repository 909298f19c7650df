"""Places of many sizes in one piece of memory. Knows offsets alone, neither memory nor what lies there."""

from __future__ import annotations

# That of the system's pages: places can be written to files without a copy, and devices copy from them at full speed.
GRANULE = 4096


class Places:
    """Hands out runs of whole granules; runs that are given back join with their neighbours.

    Where all are of one size, as those of a model without attention, the memory is cut into them and none is lost.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes // GRANULE * GRANULE
        self.used_bytes = 0
        # Free runs: length by offset, and offset by end.
        self._free: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        if self.num_bytes:
            self._put(0, self.num_bytes)

    def take(self, num_bytes: int) -> int | None:
        """Offset of a run of `num_bytes` (1 or more), the first that is long enough; None where none is."""
        needed = rounded(num_bytes)
        offset = min((at for at, length in self._free.items() if length >= needed), default=None)
        if offset is None:
            return None
        length = self._free.pop(offset)
        del self._ends[offset + length]
        if length > needed:
            self._put(offset + needed, length - needed)
        self._taken[offset] = needed
        self.used_bytes += needed
        return offset

    def give_back(self, offset: int) -> None:
        """Free a run. Raises KeyError where none was taken."""
        length = self._taken.pop(offset)
        self.used_bytes -= length
        after = self._free.pop(offset + length, None)
        if after is not None:
            del self._ends[offset + length + after]
            length += after
        before = self._ends.pop(offset, None)
        if before is not None:
            length += self._free.pop(before)
            offset = before
        self._put(offset, length)

    def check_integrity(self) -> None:
        """Raise ValueError unless every byte is in one run, free or taken, and no two free runs touch."""
        runs = sorted([*self._free.items(), *self._taken.items()])
        end = 0
        for offset, length in runs:
            if offset != end:
                raise ValueError(f"places: expected a run at {end}, got one at {offset}")
            end = offset + length
        if end != self.num_bytes or self.used_bytes != sum(self._taken.values()):
            raise ValueError("places: bytes are lost")
        if self._free.keys() & self._ends.keys() or len(self._free) != len(self._ends):
            raise ValueError("places: free runs touch")

    def _put(self, offset: int, length: int) -> None:
        self._free[offset] = length
        self._ends[offset + length] = offset


def rounded(num_bytes: int) -> int:
    """Bytes of the granules that so many bytes take."""
    return -(-num_bytes // GRANULE) * GRANULE
