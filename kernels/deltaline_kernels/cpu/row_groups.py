"""Rows of a batch that have the same counts, so that a CPU path runs them as one batch without padding.

A row's group follows from its own control values, and no value of another row enters its result. Whether that is the
same to the last bit in any company is up to the path: PyTorch rounds some functions by where a value stands.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows

# Rows longer than this run alone: their work outweighs the cost of a call, and alone they stay in cache.
MAX_SHARED_LENGTH = 64

# Where entries are: a slice of those that follow each other, else their numbers.
Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows of equal length, committed and replayed counts; all read a line or none does, all write or none does."""

    length: int
    committed: int
    replayed: int
    reads: bool
    writes: bool
    starts: list[int] = field(default_factory=list)
    read_lines: list[int] = field(default_factory=list)
    write_lines: list[int] = field(default_factory=list)
    halves: list[int] = field(default_factory=list)
    # Of each row the lines that the states after its tokens go to, if there are such.
    token_lines: list[list[int]] = field(default_factory=list)
    # By the tokens before it each waypoint: which of the rows have it, and the lines of what they are there.
    waypoints: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    line_shift: int = 0

    @cached_property
    def num_rows(self) -> int:
        return len(self.starts)

    @cached_property
    def in_place(self) -> bool:
        """Whether every row reads and writes the same line and these lines follow each other."""
        return self.writes and not self.moves and isinstance(self.read_index, slice)

    @cached_property
    def moves(self) -> bool:
        """Whether a row writes another line than it reads."""
        return self.read_lines != self.write_lines

    @cached_property
    def read_index(self) -> Index:
        """Where the lines are that the rows read: line i at i - line_shift."""
        return _index(self.read_lines, shift=self.line_shift)

    @cached_property
    def write_index(self) -> Index:
        return _index(self.write_lines, shift=self.line_shift) if self.moves else self.read_index

    @cached_property
    def token_index(self) -> Index:
        return _index(self.starts, self.length)

    @cached_property
    def replayed_halves(self) -> tuple[Tensor, Tensor]:
        """Where in drafts `[L, 2, M, record]` the halves are that the rows replay: lines and halves."""
        return torch.tensor(self.read_lines) - self.line_shift, torch.tensor(self.halves)

    @cached_property
    def written_halves(self) -> tuple[Tensor, Tensor]:
        """Where in drafts `[L, 2, M, record]` the halves are that the rows write: lines and halves."""
        return torch.tensor(self.write_lines) - self.line_shift, 1 - torch.tensor(self.halves)

    def token(self, t: int) -> "RowGroup":
        """Return token t of each row, committed, as a group of rows of one token each."""
        return RowGroup(1, 1, 0, self.reads, self.writes, starts=[start + t for start in self.starts])

    def lines_of(self, t: int) -> tuple[Index, Index]:
        """Return where the rows are whose state after token t is kept, and the lines that these states go to."""
        return self._index_kept([(i, lines[t]) for i, lines in enumerate(self.token_lines) if lines[t] > 0])

    def part(self, begin: int, end: int) -> "RowGroup":
        """Return tokens begin..end of rows that commit, as a group; `committed` stays that of the whole rows."""
        starts = [start + begin for start in self.starts]
        return RowGroup(end - begin, self.committed, 0, self.reads, self.writes, starts=starts)

    def lines_at(self, done: int) -> tuple[Index, Index]:
        """Return where the rows are that have a waypoint after `done` tokens, and its lines."""
        return self._index_kept(self.waypoints.get(done, []))

    def _index_kept(self, kept: list[tuple[int, int]]) -> tuple[Index, Index]:
        """Return the indices of rows and of lines."""
        if not kept:
            return slice(0, 0), slice(0, 0)
        rows, lines = zip(*kept, strict=True)
        return _index(list(rows)), _index(list(lines), shift=self.line_shift)

    def tokens(self, packed: Tensor) -> Tensor:
        """Return the rows' tokens as `[B, n, ...]`: a view where the rows follow each other, else a copy."""
        return self.tokens_of(packed)[0]

    def tokens_of(self, *packed: Tensor) -> list[Tensor]:
        """Return the `tokens` of each."""
        index, found = self.token_index, []
        for x in packed:
            taken = x[index] if isinstance(index, slice) else x.index_select(0, index)
            found.append(taken.view(self.num_rows, self.length, *x.shape[1:]))
        return found

    def empty_output(self, packed: Tensor) -> tuple[Tensor, bool]:
        """Return fp32 room `[B, n, ...]` for the rows' outputs, and whether it is that of `packed` itself."""
        if packed.dtype == torch.float32 and isinstance(self.token_index, slice):
            return self.tokens_of(packed)[0], True
        return torch.empty((self.num_rows, self.length, *packed.shape[1:]), dtype=torch.float32), False


def group_rows(rows: Rows, line_shift: int = 0) -> tuple[list[RowGroup], list[tuple[int, int]]]:
    """Return the groups of `rows` (on the CPU) and the token ranges of the skipped rows.

    Line i of the rows is line i - line_shift of the layers.
    """
    waypoints = () if rows.waypoints is None else tuple(tuple(found.items()) for found in rows.find_waypoints())
    return _group(tuple(map(tuple, rows.control.tolist())), waypoints, line_shift)


@lru_cache(maxsize=1)
def _group(
    control: tuple[tuple[int, ...], ...], waypoints: tuple[tuple[tuple[int, int], ...], ...], line_shift: int
) -> tuple[list[RowGroup], list[tuple[int, int]]]:
    """See `group_rows`; the last batch's groups are kept by what its control says, since every layer asks for them."""
    groups: dict[tuple[int, ...], RowGroup] = {}
    skipped = []
    starts, reads, writes, committed, replayed, halves, _, *table = control
    # By line: lines that follow each other then do so in their group too, whatever the order of the rows.
    for i in sorted(range(len(starts) - 1), key=list(zip(reads, writes, strict=True)).__getitem__):
        length, read, write = starts[i + 1] - starts[i], reads[i], writes[i]
        if read == -1 and write == -1:
            skipped.append((starts[i], starts[i + 1]))
            continue
        r = replayed[i] if read > 0 else 0
        alone = i + 1 if length > MAX_SHARED_LENGTH else 0
        key = (length, committed[i], r, read > 0, write > 0, alone)
        group = groups.get(key)
        if group is None:
            counts = (length, committed[i], r)
            group = groups[key] = RowGroup(*counts, read > 0, write > 0, line_shift=line_shift)
        group.starts.append(starts[i])
        group.read_lines.append(read)
        group.write_lines.append(write)
        group.halves.append(halves[i])
        if table:
            group.token_lines.append([lines[i] for lines in table[:length]])
        for done, line in waypoints[i] if waypoints else ():
            group.waypoints.setdefault(done, []).append((len(group.starts) - 1, line))
    return list(groups.values()), skipped


def take(pool: Tensor, index: Index) -> Tensor:
    """Return `pool[index]`: a view for a slice, else a copy."""
    return pool[index] if isinstance(index, slice) else pool.index_select(0, index)


def put(pool: Tensor, index: Index, values: Tensor) -> None:
    """Write `values` to `pool[index]`, rounded to the pool's dtype."""
    if isinstance(index, slice):
        pool[index].copy_(values)
    else:
        pool.index_copy_(0, index, values.to(pool.dtype))


def _index(starts: list[int], length: int = 1, shift: int = 0) -> Index:
    """Return the index of stretches of `length` entries each, `shift` entries before `starts`."""
    first = starts[0] - shift
    if length == 0:
        return slice(first, first)
    end = first + length * len(starts)
    if starts == list(range(first + shift, end + shift, length)):
        return slice(first, end)
    index = torch.tensor(starts) - shift
    return index if length == 1 else (index[:, None] + torch.arange(length)).flatten()
