"""Rows of a batch that have the same counts, so that a CPU path runs them as one batch without padding.

A row's cohort follows from its own control values, and no value of another row enters its result. Whether that is the
same to the last bit in any company is up to the path: PyTorch rounds some functions by where a value stands.
Knows tokens and lines as integers on the host. Does not know what is computed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaline_kernels.rows import Rows

# Rows longer than this run alone: their work outweighs the cost of a call, and alone they stay in cache.
MAX_SHARED_LENGTH = 64


@dataclass(frozen=True)
class Cohort:
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

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def in_place(self) -> bool:
        """Whether every row reads and writes the same line and these lines follow each other."""
        return self.writes and self.read_lines == self.write_lines and is_run(self.read_lines)

    @property
    def packed(self) -> bool:
        """Whether the rows' tokens follow each other, so that `tokens` returns a view."""
        return self.length == 0 or is_run(self.starts, self.length)

    def tokens(self, packed: Tensor) -> Tensor:
        """Return the rows' tokens as `[B, n, ...]`: a view where the rows follow each other, else a copy."""
        if self.packed:
            taken = packed[self.starts[0] : self.starts[0] + self.num_rows * self.length]
        else:
            taken = packed.index_select(0, self._token_index())
        return taken.view(self.num_rows, self.length, *packed.shape[1:])

    def put_tokens(self, packed: Tensor, values: Tensor) -> None:
        """Write `values` `[B, n, ...]` to the rows' tokens of `packed`."""
        if self.packed:
            self.tokens(packed).copy_(values)
        else:
            packed[self._token_index()] = values.flatten(0, 1).to(packed.dtype)

    def _token_index(self) -> Tensor:
        return (torch.tensor(self.starts)[:, None] + torch.arange(self.length)).flatten()


def group_rows(rows: Rows) -> tuple[list[Cohort], list[tuple[int, int]]]:
    """Return the cohorts of `rows` (on the CPU) and the token ranges of the skipped rows."""
    cohorts: dict[tuple[int, ...], Cohort] = {}
    skipped = []
    starts, reads, writes, committed, replayed, halves, _ = rows.control.tolist()
    # By line: lines that follow each other then do so in their cohort too, whatever the order of the rows.
    for i in sorted(range(rows.num_rows), key=list(zip(reads, writes, strict=True)).__getitem__):
        length, read, write = starts[i + 1] - starts[i], reads[i], writes[i]
        if read == -1 and write == -1:
            skipped.append((starts[i], starts[i + 1]))
            continue
        r = replayed[i] if read > 0 else 0
        alone = i + 1 if length > MAX_SHARED_LENGTH else 0
        key = (length, committed[i], r, read > 0, write > 0, alone)
        cohort = cohorts.get(key)
        if cohort is None:
            cohort = cohorts[key] = Cohort(length, committed[i], r, read > 0, write > 0)
        cohort.starts.append(starts[i])
        cohort.read_lines.append(read)
        cohort.write_lines.append(write)
        cohort.halves.append(halves[i])
    return list(cohorts.values()), skipped


def is_run(numbers: list[int], step: int = 1) -> bool:
    """Whether each number follows the one before it by `step`, which is not 0."""
    return numbers == list(range(numbers[0], numbers[0] + step * len(numbers), step))


def take(pool: Tensor, lines: list[int]) -> Tensor:
    """Return `pool[lines]`: a view where the lines follow each other, else a copy."""
    if is_run(lines):
        return pool[lines[0] : lines[0] + len(lines)]
    return pool.index_select(0, torch.tensor(lines))


def put(pool: Tensor, lines: list[int], values: Tensor) -> None:
    """Write `values` to `pool[lines]`, rounded to the pool's dtype."""
    if is_run(lines):
        pool[lines[0] : lines[0] + len(lines)].copy_(values)
    else:
        pool.index_copy_(0, torch.tensor(lines), values.to(pool.dtype))
