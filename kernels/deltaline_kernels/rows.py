"""What a launch does with each row of a batch: packed token offsets, lines and counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels.checks import check_positive

NUM_FIELDS = 7


@dataclass(frozen=True, eq=False)
class StateLines:
    """The recurrent lines of a layer, which rows read and write.

    Args:
        state: `[L, HV, V, K]` (Mamba2: `[L, H, P, S]`) fp32 or bf16, contiguous.
        drafts: `[L, 2, M, record]` fp32, contiguous.
        shift: line i of the rows is line i - shift here: with 1, since line 0 of the rows is the zero state, every line
            of the tensors is in use.
    """

    state: Tensor
    drafts: Tensor
    shift: int = 0

    def arguments(self, rows: "Rows", o: Tensor) -> tuple[Tensor | int, ...]:
        """Return what every kernel takes in this order: state, drafts, outputs, control, its stride and M."""
        return self.state, self.drafts, o, rows.control, rows.control.stride(0), self.drafts.shape[2]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a batch: one int32 control tensor and the host's bounds on it.

    Args:
        control: `[7, N+1]` int32, last dimension contiguous, on the device of the tensors. Its fields, in order:
            0 query_start_loc `[N+1]`: first packed token of each row; the last entry is the end of the last row.
            1 read_line `[N]`: 0 is the zero state; -1 together with write_line -1 skips the row (outputs are zero).
            2 write_line `[N]`: -1 computes and writes nothing.
            3 num_committed `[N]`: tokens that join the state now: the row's length, or 0 for a VERIFY row.
            4 num_replayed `[N]`: accepted tokens of the previous VERIFY, folded in before this row's tokens.
            5 draft_half `[N]`: the half of read_line's drafts that holds them; a VERIFY row writes to the other half.
            6 position `[N]`: tokens of the row's sequence before this row's, the replayed ones among them.
            The last column of fields 1..6 is padding.
        num_short: the first rows, that have at most `max_short` tokens each; VERIFY rows are among them.
        max_short: upper bound of the length of a short row.
        max_length: upper bound of the length of any row.

    The contents of `control` are the caller's promise: no launch reads them back from a device.
    """

    control: Tensor
    num_short: int
    max_short: int
    max_length: int

    def __post_init__(self) -> None:
        control = self.control
        if control.dtype != torch.int32:
            raise TypeError(f"control: expected torch.int32, got {control.dtype}")
        if control.ndim != 2 or control.shape[0] != NUM_FIELDS or control.shape[1] < 1:
            raise ValueError(f"control: expected shape [{NUM_FIELDS}, N+1], got {list(control.shape)}")
        if control.stride(1) != 1:
            raise ValueError(f"control: expected a contiguous last dimension, got strides {control.stride()}")
        num_rows = control.shape[1] - 1
        if not 0 <= self.num_short <= num_rows:
            raise ValueError(f"num_short: expected 0..{num_rows}, got {self.num_short}")
        check_positive("max_short", self.max_short)
        if self.max_length < 0:
            raise ValueError(f"max_length: expected at least 0, got {self.max_length}")

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

    def short(self) -> "Rows":
        """Return the short rows as a view."""
        control = self.control[:, : self.num_short + 1]
        return Rows(control, self.num_short, self.max_short, min(self.max_short, self.max_length))

    def long(self) -> "Rows":
        """Return the rows that are not short as a view."""
        return Rows(self.control[:, self.num_short :], 0, self.max_short, self.max_length)

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
    ) -> "Rows":
        """Build the control tensor from host values; rows are packed from token 0.

        The short rows are the longest run of leading rows with at most `max_short` tokens. Without `position` each
        row's is the least that there can be, which is all the same to what keeps its past in a state of one size.

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
        _check_lines(read_line, write_line)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        control = torch.tensor([starts, *([*values, 0] for values in fields.values())], dtype=torch.int32)
        return cls(control.to(device), num_short, max_short, max(lengths, default=0))


def check_rows(rows: Rows, device: torch.device) -> None:
    """Raise TypeError or ValueError unless `rows` are Rows on `device`."""
    if not isinstance(rows, Rows):
        raise TypeError(f"rows: expected Rows, got {type(rows).__name__}")
    if rows.control.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.control.device}")


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


def _check_lines(read_line: Sequence[int], write_line: Sequence[int]) -> None:
    """Raise ValueError if a line is impossible or two rows write the same one."""
    for i, (read, write) in enumerate(zip(read_line, write_line, strict=True)):
        if read < -1 or (read == -1 and write != -1):
            raise ValueError(f"read_line[{i}]: expected a line, or -1 together with write_line -1, got {read}")
        if write < -1:
            raise ValueError(f"write_line[{i}]: expected a line or -1, got {write}")
    written = [line for line in write_line if line > 0]
    if len(set(written)) != len(written):
        raise ValueError(f"write_line: expected distinct lines, got {list(write_line)}")
