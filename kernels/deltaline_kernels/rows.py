"""What a launch does with each row of a batch: packed token offsets, lines and counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest

import torch
from torch import Tensor

from deltaline_kernels.checks import check_positive, check_tensor

NUM_FIELDS = 7
# A waypoint stands behind a multiple of so many tokens of its row.
WAYPOINT_TOKENS = 64


@dataclass(frozen=True, eq=False)
class StateLines:
    """The recurrent lines of a layer, which rows read and write.

    Args:
        state: `[L, HV, V, K]` (Mamba2: `[L, H, P, S]`) fp32, bf16 or fp16; a line stride is fine.
        drafts: `[L, 2, M, record]` fp32; a line stride is fine.
        shift: line i of the rows is line i - shift here: with 1, since line 0 of the rows is the zero state, every line
            of the tensors is in use.
        written: `[lines, HV, V, K]` likewise, of the same dtype or another, that shares no memory with `state`: where
            rows write, while `state` is only read. None: they write to `state`.
    """

    state: Tensor
    drafts: Tensor
    shift: int = 0
    written: Tensor | None = None

    def arguments(self, rows: "Rows", o: Tensor) -> tuple[tuple[Tensor | int, ...], Tensor, Tensor, int]:
        """Return what every kernel takes in this order: `lines` (device/lines.py), outputs, control and its stride."""
        state, drafts = self.state, self.drafts
        written = state if self.written is None else self.written
        strides = (_line_stride(state), _line_stride(written), _line_stride(drafts), drafts.stride(1))
        return (state, written, drafts, *strides), o, rows.control, rows.control.stride(0)

    @property
    def constants(self) -> dict[str, int]:
        """Constants of every kernel."""
        return {"LINE_SHIFT": self.shift, "APART": self.written is not None}


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a batch: one int32 control tensor and the host's bounds on it.

    Args:
        control: `[7 + t, N+1]` int32, last dimension contiguous, on the device of the tensors. Its fields, in order:
            0 query_start_loc `[N+1]`: first packed token of each row; the last entry is the end of the last row.
            1 read_line `[N]`: 0 is the zero state; -1 together with write_line -1 skips the row (outputs are zero).
            2 write_line `[N]`: -1 computes and writes nothing.
            3 num_committed `[N]`: tokens that join the state now: the row's length, or 0 for a VERIFY row.
            4 num_replayed `[N]`: accepted tokens of the previous VERIFY, folded in before this row's tokens.
            5 draft_half `[N]`: the half of read_line's drafts that holds them; a VERIFY row writes to the other half.
            6 position `[N]`: tokens of the row's sequence before this row's, the replayed ones among them.
            7.. token_lines `[t, N]`: the recurrences also write the state after a row's token j, rounded, to the line
                that field 7 + j has, if it is above 0. Such rows are short, and no VERIFY.
            The last column of fields 1.. is padding.
        num_short: the first rows, that have at most `max_short` tokens each; VERIFY rows are among them.
        max_short: upper bound of the length of a short row.
        max_length: upper bound of the length of any row.
        num_token_lines: t, at least max_length or 0.
        waypoints: int32, contiguous, on control's device; for T packed tokens `T // 64 + N` entries or more. None: no
            row has any. Entry query_start_loc[i] // 64 + i + c - 1 has a line for what row i is after c * 64 of its
            tokens, c of 1..length // 64, or -1 (any number below 1) for none. Recurrences write the state to that line,
            rounded, and convolutions the last W-1 tokens to its first W-1 columns: the bits that they would write to
            the row's write line if it ended there. Nothing else of the line is written, neither other columns nor
            drafts. No row reads or writes the line. All other entries, and those of rows that are skipped or short, say
            nothing; max_short is below 64.

    The contents of `control` and `waypoints` are the caller's promise: no launch reads them back from a device.
    """

    control: Tensor
    num_short: int
    max_short: int
    max_length: int
    num_token_lines: int = 0
    waypoints: Tensor | None = None

    def __post_init__(self) -> None:
        control = self.control
        if not isinstance(control, Tensor):
            raise TypeError(f"control: expected a tensor, got {type(control).__name__}")
        if control.dtype != torch.int32:
            raise TypeError(f"control: expected torch.int32, got {control.dtype}")
        num_fields = NUM_FIELDS + self.num_token_lines
        if control.ndim != 2 or control.shape[0] != num_fields or control.shape[1] < 1:
            raise ValueError(f"control: expected shape [{num_fields}, N+1], got {list(control.shape)}")
        if control.stride(1) != 1:
            raise ValueError(f"control: expected a contiguous last dimension, got strides {control.stride()}")
        num_rows = control.shape[1] - 1
        if not 0 <= self.num_short <= num_rows:
            raise ValueError(f"num_short: expected 0..{num_rows}, got {self.num_short}")
        check_positive("max_short", self.max_short)
        if self.max_length < 0:
            raise ValueError(f"max_length: expected at least 0, got {self.max_length}")
        if self.num_token_lines > 0:
            if self.num_short < num_rows:
                raise ValueError(f"num_short: expected {num_rows}, all rows of token lines, got {self.num_short}")
            if self.max_length > self.num_token_lines:
                raise ValueError(f"num_token_lines: expected at least {self.max_length}, got {self.num_token_lines}")
        if self.waypoints is not None:
            check_tensor("waypoints", self.waypoints, (None,), (torch.int32,), control.device)
            if self.max_short >= WAYPOINT_TOKENS:
                raise ValueError(f"max_short: expected below {WAYPOINT_TOKENS} beside waypoints, got {self.max_short}")

    @property
    def num_rows(self) -> int:
        return self.control.shape[1] - 1

    @property
    def query_start_loc(self) -> Tensor:
        return self.control[0]

    @property
    def read_line(self) -> Tensor:
        return self.control[1, :-1]

    @property
    def write_line(self) -> Tensor:
        return self.control[2, :-1]

    @property
    def num_committed(self) -> Tensor:
        return self.control[3, :-1]

    @property
    def num_replayed(self) -> Tensor:
        return self.control[4, :-1]

    @property
    def draft_half(self) -> Tensor:
        return self.control[5, :-1]

    @property
    def position(self) -> Tensor:
        return self.control[6, :-1]

    @property
    def token_lines(self) -> Tensor:
        return self.control[NUM_FIELDS:, :-1]

    def short(self) -> "Rows":
        """Return the short rows as a view."""
        control = self.control[:, : self.num_short + 1]
        longest = min(self.max_short, self.max_length)
        return Rows(control, self.num_short, self.max_short, longest, self.num_token_lines)

    def long(self) -> "Rows":
        """Return the rows that are not short as a view."""
        # A row's entries are as many places behind its chunks as there are rows before it.
        waypoints = None if self.waypoints is None else self.waypoints[self.num_short :]
        control = self.control[:NUM_FIELDS, self.num_short :]
        return Rows(control, 0, self.max_short, self.max_length, waypoints=waypoints)

    def find_waypoints(self) -> list[dict[int, int]]:
        """Return the lines of each row's waypoints by the tokens of the row before them; waits for the device."""
        if self.waypoints is None:
            return [{}] * self.num_rows
        starts, lines = self.query_start_loc.tolist(), self.waypoints.tolist()
        found = []
        for i, (begin, end) in enumerate(pairwise(starts)):
            first = begin // WAYPOINT_TOKENS + i
            places = range(WAYPOINT_TOKENS, end - begin + 1, WAYPOINT_TOKENS)
            row = {done: lines[first + done // WAYPOINT_TOKENS - 1] for done in places}
            found.append({done: line for done, line in row.items() if line > 0})
        return found

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        read_line: Sequence[int],
        write_line: Sequence[int],
        num_committed: Sequence[int],
        num_replayed: Sequence[int],
        draft_half: Sequence[int],
        *,
        max_short: int,
        device: torch.device | str,
        position: Sequence[int] | None = None,
        token_lines: Sequence[Sequence[int]] | None = None,
        waypoints: Sequence[tuple[int, int, int]] | None = None,
    ) -> "Rows":
        """Build the control tensor from host values; rows are packed from token 0.

        The short rows are the longest run of leading rows with at most `max_short` tokens. No row may read a line that
        another one writes. Without `position` each row's is the least that there can be, which is all the same to what
        keeps its past in a state of one size.
        `token_lines` has a line for each token of each row, -1 for none. `waypoints` are triples, in any order: a row,
        how many of its tokens stand before it, and the line for what the row is there; with an empty list every entry
        is -1.

        Raises:
            ValueError: a field has another number of rows, or values that contradict each other.
        """
        check_positive("max_short", max_short)
        num_rows = len(lengths)
        fields = {
            "read_line": read_line,
            "write_line": write_line,
            "num_committed": num_committed,
            "num_replayed": num_replayed,
            "draft_half": draft_half,
            "position": num_replayed if position is None else position,
        }
        for name, values in fields.items():
            if len(values) != num_rows:
                raise ValueError(f"{name}: expected {num_rows} values, got {len(values)}")
        num_short = next((i for i, length in enumerate(lengths) if length > max_short), num_rows)
        for i, length in enumerate(lengths):
            _check_row(i, length, num_committed[i], num_replayed[i], draft_half[i], i < num_short)
            if fields["position"][i] < num_replayed[i]:
                raise ValueError(f"position[{i}]: expected at least {num_replayed[i]}, got {fields['position'][i]}")
        kept: Sequence[Sequence[int]] = [[]] * num_rows
        if token_lines is not None:
            _check_token_lines(token_lines, lengths, num_committed, max_short)
            kept = token_lines
        _check_lines(read_line, [[write, *lines] for write, lines in zip(write_line, kept, strict=True)])
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        last = list(zip_longest(*kept, fillvalue=-1))  # by token
        control = torch.tensor([starts, *([*values, 0] for values in (*fields.values(), *last))], dtype=torch.int32)
        placed = None
        if waypoints is not None:
            taken = {line for line in (*read_line, *write_line, *chain(*kept)) if line > 0}
            entries = _place_waypoints(waypoints, starts, num_short, taken)
            placed = torch.tensor(entries, dtype=torch.int32).to(device)
        return cls(control.to(device), num_short, max_short, max(lengths, default=0), len(last), placed)


def check_rows(rows: Rows, device: torch.device) -> None:
    """Raise TypeError or ValueError unless `rows` are Rows on `device`."""
    if not isinstance(rows, Rows):
        raise TypeError(f"rows: expected Rows, got {type(rows).__name__}")
    if rows.control.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.control.device}")


def check_waypoints(rows: Rows, num_tokens: int) -> None:
    """Raise ValueError unless the waypoints, if there are any, have an entry for each chunk of `num_tokens` tokens."""
    if rows.waypoints is not None:
        least, found = num_tokens // WAYPOINT_TOKENS + rows.num_rows, rows.waypoints.shape[0]
        if found < least:
            raise ValueError(
                f"waypoints: expected at least {least} entries, a chunk's each of {num_tokens} tokens, got {found}"
            )


def _check_row(i: int, length: int, committed: int, replayed: int, half: int, short: bool) -> None:
    """Raise ValueError if the counts of row i contradict each other."""
    if length < 0:
        raise ValueError(f"lengths[{i}]: expected at least 0, got {length}")
    if committed not in (0, length):
        raise ValueError(f"num_committed[{i}]: expected 0 or {length}, got {committed}")
    if committed < length and not short:
        raise ValueError(f"num_committed[{i}]: expected {length} (a VERIFY row must be short), got {committed}")
    if replayed < 0:
        raise ValueError(f"num_replayed[{i}]: expected at least 0, got {replayed}")
    if half not in (0, 1):
        raise ValueError(f"draft_half[{i}]: expected 0 or 1, got {half}")


def _check_token_lines(
    token_lines: Sequence[Sequence[int]], lengths: Sequence[int], committed: Sequence[int], max_short: int
) -> None:
    """Raise ValueError unless each row has a line for each of its tokens, is short, and is no VERIFY."""
    if len(token_lines) != len(lengths):
        raise ValueError(f"token_lines: expected {len(lengths)} rows, got {len(token_lines)}")
    for i, (lines, length) in enumerate(zip(token_lines, lengths, strict=True)):
        if len(lines) != length:
            raise ValueError(f"token_lines[{i}]: expected {length} lines, got {len(lines)}")
        if length > max_short:
            raise ValueError(f"lengths[{i}]: expected at most {max_short} beside token_lines, got {length}")
        if committed[i] != length:
            raise ValueError(f"num_committed[{i}]: expected {length} beside token_lines, got {committed[i]}")


def _check_lines(read_line: Sequence[int], written: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a line is impossible, two rows write the same one or one reads what another writes; `written`
    has write_line first."""
    for i, (read, lines) in enumerate(zip(read_line, written, strict=True)):
        if read < -1 or (read == -1 and lines != [-1] * len(lines)):
            raise ValueError(f"read_line[{i}]: expected a line, or -1 together with write_line -1, got {read}")
        for line in lines:
            if line < -1:
                raise ValueError(f"write_line[{i}]: expected a line or -1, got {line}")
    used = [line for lines in written for line in {*lines} if line > 0]
    if len(set(used)) != len(used):
        raise ValueError(f"write_line: expected distinct lines, got {[lines[0] for lines in written]}")
    writer = {line: i for i, lines in enumerate(written) for line in lines if line > 0}
    for i, line in enumerate(read_line):
        if writer.get(line, i) != i:
            raise ValueError(f"read_line[{i}]: expected a line that no other row writes, got {line}")


def _place_waypoints(
    waypoints: Sequence[tuple[int, int, int]], starts: Sequence[int], num_short: int, taken: set[int]
) -> list[int]:
    """Return the entries of `Rows.waypoints`; raise ValueError for one that is nowhere, or whose line is `taken`."""
    num_rows = len(starts) - 1
    entries = [-1] * (starts[-1] // WAYPOINT_TOKENS + num_rows)
    lines = set(taken)
    for j, (i, done, line) in enumerate(waypoints):
        if not num_short <= i < num_rows:
            raise ValueError(f"waypoints[{j}]: expected a row of {num_short}..{num_rows - 1}, not a short one, got {i}")
        length = starts[i + 1] - starts[i]
        if not 0 < done <= length or done % WAYPOINT_TOKENS:
            raise ValueError(
                f"waypoints[{j}]: expected a multiple of {WAYPOINT_TOKENS} of at most {length} tokens, got {done}"
            )
        if line < 1 or line in lines:
            raise ValueError(f"waypoints[{j}]: expected a line that nothing else reads or writes, got {line}")
        place = starts[i] // WAYPOINT_TOKENS + i + done // WAYPOINT_TOKENS - 1
        if entries[place] != -1:
            raise ValueError(f"waypoints[{j}]: expected one at {done} tokens of row {i}, got another")
        lines.add(line)
        entries[place] = line
    return entries


def _line_stride(lines: Tensor) -> int:
    """Return how far two lines are apart; that of a single one, which means nothing, as if they were packed."""
    return lines.stride(0) if lines.shape[0] > 1 else math.prod(lines.shape[1:])
