"""What engines say of the rows of a batch, read back to the host and checked, and `Rows` made of it.

Line j of an engine is line j + 1 of `Rows`, whose line 0 is the zero state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from deltaline_kernels.compat.arguments import EngineRows
from deltaline_kernels.rows import NUM_FIELDS, Rows

LINE_SHIFT = 1


@dataclass(frozen=True)
class HostRow:
    """One row that is not empty: its tokens, its lines, how many tokens of the step before it says were accepted, and
    the column that its history begins at, None for no history.
    """

    begin: int
    end: int
    read: int
    write: int
    skipped: bool
    accepted: int
    first_column: int | None

    @property
    def length(self) -> int:
        return self.end - self.begin


def read_back(rows: EngineRows, columns: int, width: int) -> list[HostRow]:
    """Return the rows that are not empty; waits for the device."""
    n = rows.num_rows
    if rows.starts is None:
        starts = list(range(0, (n + 1) * rows.length, rows.length)) if rows.length else [0] * (n + 1)
    else:
        starts = rows.starts[: n + 1].tolist()
    reads = list(range(n)) if rows.read_line is None else rows.read_line.tolist()
    writes = reads if rows.write_line is rows.read_line or rows.write_line is None else rows.write_line.tolist()
    history = [rows.history] * n if isinstance(rows.history, bool) else rows.history.tolist()
    accepted = [1] * n if rows.num_accepted is None else rows.num_accepted[:n].tolist()
    if rows.moves:
        writes = [-1 if line == rows.pad else max(line, -1) for line in writes]
    return [
        HostRow(
            starts[i],
            starts[i + 1],
            reads[i],
            writes[i],
            any(line < 0 or line == rows.pad for line in ((reads[i],) if rows.moves else (reads[i], writes[i]))),
            accepted[i],
            min(max(accepted[i] - 1, 0), columns - width + 1) if history[i] else None,
        )
        for i in range(n)
        if rows.moves or starts[i] != starts[i + 1]
    ]


def place_rows(
    rows: EngineRows, num_tokens: int, device: torch.device, columns: int = 0, width: int = 1, *, keep: bool
) -> Rows:
    """Return the rows over lines of `columns` columns, which they write if `keep`; does not wait for a GPU.

    Where nothing is speculative, the columns of a line and the width of a filter do not count.
    """
    if device.type == "cpu":
        return place_on_host(rows, num_tokens, device, columns, width, keep=keep)
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.compat.build_rows import build_rows

    return build_rows(rows, num_tokens, device, columns, width, keep=keep)


def place_on_host(
    rows: EngineRows, num_tokens: int, device: torch.device, columns: int, width: int, *, keep: bool
) -> Rows:
    """Do what `place_rows` does, on the host, for the rows that do something."""
    if rows.token_lines is not None:
        return _place_tokens(rows, rows.token_lines, num_tokens, device)
    found = read_back(rows, columns, width)
    fields: list[list[int]] = [[found[0].begin if found else 0], *([] for _ in range(NUM_FIELDS - 1))]
    for row in found:
        read = -1 if row.skipped else 0 if row.first_column is None else row.read + LINE_SHIFT
        write = row.write + LINE_SHIFT if keep and not row.skipped else -1
        # Of a speculative row only the first token is certain to be accepted.
        committed = row.length if rows.num_accepted is None else 1
        for values, value in zip(fields, (row.end, read, write, committed, row.first_column or 0, 0, 0), strict=True):
            values.append(value)
    control = torch.tensor([fields[0], *([*values, 0] for values in fields[1:])], dtype=torch.int32, device=device)
    return Rows(control, 0, 1, num_tokens)


def _place_tokens(rows: EngineRows, token_lines: torch.Tensor, num_tokens: int, device: torch.device) -> Rows:
    """Do what `place_rows` does, on the host, for rows with a line for each token, no longer than their table."""
    assert rows.read_line is not None
    n, width = rows.num_rows, rows.most_states(num_tokens)
    starts = [i * rows.length for i in range(n + 1)] if rows.starts is None else rows.starts[: n + 1].tolist()
    reads, tables = rows.read_line.tolist(), token_lines.tolist()
    accepted = [1] * n if rows.num_accepted is None else rows.num_accepted.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    read_line, columns = [], []
    for row, table, count, length in zip(reads, tables, accepted, lengths, strict=True):
        begin = row[min(max(count - 1, 0), len(row) - 1)]
        lines = [-1 if line < 0 or line == rows.pad else line + LINE_SHIFT for line in table[:length]]
        live = length > 0 and begin >= 0 and begin != rows.pad and (rows.moves or -1 not in lines)
        read_line.append(begin + LINE_SHIFT if live else -1)
        columns.append([*(lines if live else ()), *[-1] * width][:width])
    nothing = [0] * n
    fields = [read_line, [-1] * n, lengths, nothing, nothing, nothing, *map(list, zip(*columns, strict=True))]
    control = torch.tensor([starts, *([*values, 0] for values in fields)], dtype=torch.int32, device=device)
    return Rows(control, n, max(width, 1), width, width)


def check_contents(
    rows: EngineRows, name: str, num_tokens: int, num_lines: int | None, columns: int, width: int
) -> None:
    """Check what the tensors say; waits for the device. `name` is that of the lines' argument.

    Raises:
        ValueError: offsets that fall or leave the tokens, a row longer than the bound or than its line can keep, an
            accepted count that no line holds, a line out of range, or one that a row writes and another one uses. What
            is said of rows that are empty or skipped is not checked.
    """
    check_offsets(rows, num_tokens)
    live = [row for row in read_back(rows, columns, width) if not row.skipped]
    check_lengths(rows, live, columns, width)
    most = rows.most_tokens(columns, width)
    if most is not None:
        accepted = [row.accepted for row in live]
        if not all(0 <= count <= most for count in accepted):
            raise ValueError(f"num_accepted_tokens: expected counts of 0..{most}, got {accepted}")
    if num_lines is not None:
        used = [(None if row.first_column is None else row.read, [row.write]) for row in live]
        check_lines(name, "line", used, num_lines)


def check_offsets(rows: EngineRows, num_tokens: int, name: str = "query_start_loc") -> None:
    """Raise ValueError for offsets, of that name, that fall or leave the tokens."""
    if rows.starts is not None:
        starts = rows.starts[: rows.num_rows + 1].tolist()
        if starts != sorted(starts) or starts[0] < 0 or starts[-1] > num_tokens:
            raise ValueError(f"{name}: expected offsets that rise within 0..{num_tokens}, got {starts}")


def check_lengths(rows: EngineRows, live: list[HostRow], columns: int, width: int) -> None:
    """Raise ValueError for a row longer than the bound or than its line can keep; the offsets are checked before."""
    most = rows.most_tokens(columns, width)
    longest = max((row.length for row in live), default=0)
    if longest > rows.longest:
        raise ValueError(f"max_query_len: expected at least {longest} as a row has, got {rows.longest}")
    if most is not None and longest > most:
        raise ValueError(f"query_start_loc: expected rows of at most {most} tokens, got {longest}")


def check_lines(name: str, word: str, used: Sequence[tuple[int | None, Sequence[int]]], num_lines: int) -> None:
    """Check the lines that each row begins with, None for none, and writes.

    `name` is that of their argument, `word` what they are called there.

    Raises:
        ValueError: a line out of range, or one that a row writes and another one uses.
    """
    writers: dict[int, int] = {}
    for i, (begin, written) in enumerate(used):
        largest = max(written if begin is None else (begin, *written), default=-1)
        if largest >= num_lines:
            raise ValueError(f"{name}: expected {word}s below {num_lines}, got {largest}")
        for line in written:
            if writers.setdefault(line, i) != i:
                raise ValueError(f"{name}: expected no {word} that two rows write, got {word} {line} twice")
    for i, (begin, _) in enumerate(used):
        if begin is not None and writers.get(begin, i) != i:
            raise ValueError(f"{name}: expected no {word} that one row reads and another writes, got {word} {begin}")
