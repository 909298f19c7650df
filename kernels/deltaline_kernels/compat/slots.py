"""States in the slots of pools: which one a row begins with, and where its last, or that after each token, goes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltaline_kernels.checks import STATES
from deltaline_kernels.compat.arguments import INTEGERS, EngineRows, check_is, check_operand
from deltaline_kernels.compat.recurrence import AnyInputs, Operation, advance
from deltaline_kernels.compat.rows import check_lines, check_offsets


@dataclass(frozen=True, eq=False)
class Slots:
    """Where the rows of a call find their states and leave them, and what the arguments are called that say so.

    Args:
        pool: `[slots, HV, V, K]`, a line stride is fine. Mutated, unless `final_pool` is there.
        slots: `[N]`, or a table `[N, columns]`; perhaps more rows, which are not read.
        final_pool: where states go, which shares no memory with `pool` or is it; None: `pool`.
        final_slots: `[N]`, or where `slots` is a table one as well: where the state after each token goes. None:
            `slots`.
        accepted: `[N]` or None, with tables only: row i begins with `slots[i, accepted[i] - 1]`, bounded to the table,
            or with the first.
        keep: False, without tables alone: no state is written, and several rows may have one slot.
        pad: a slot of this number, or a negative one, is none. A row that begins with none is skipped; of final slots
            it says that a state is not kept, where they are those of `slots` that the row is skipped.
    """

    name: str
    pool: Tensor
    slots: Tensor
    final_pool: Tensor | None = None
    final_slots: Tensor | None = None
    final_name: str = ""
    accepted: Tensor | None = None
    pad: int = -1
    keep: bool = True

    @property
    def is_table(self) -> bool:
        return self.slots.ndim == 2

    @property
    def written(self) -> Tensor | None:
        """The pool that states go to, if it is another one."""
        return None if self.final_pool is self.pool else self.final_pool

    @property
    def moves(self) -> bool:
        """Whether a row may leave its state elsewhere than where it began."""
        return self.written is not None or self.final_slots is not None


def check_pool(name: str, pool: Tensor | None, sizes: dict[str, int | None], device: torch.device) -> Tensor:
    """Check and return states `sizes` that lie where they are read or changed.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    pool = check_operand(name, pool, sizes, STATES, device, beside=None)
    if not pool.is_contiguous() and (not pool[:1].is_contiguous() or pool.stride(0) < pool[:1].numel()):
        raise ValueError(f"{name}: expected states that are packed and apart, got strides {pool.stride()}")
    return pool


def check_slots(rows: EngineRows, given: Slots, num_tokens: int) -> Slots:
    """Check what `given` says of the rows, and return it without what is of no row; waits for the CPU alone.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    n, device, accepted, targets = rows.num_rows, given.pool.device, given.accepted, given.final_slots
    is_table = isinstance(given.slots, Tensor) and given.is_table
    _check_rows(given.name, given.slots, n, device, 2 if is_table else 1)
    if targets is not None:
        _check_rows(given.final_name, targets, n, device, 2 if is_table else 1)
        targets = targets[:n]
    if not is_table:
        check_is(None, f"as {given.name} is no table", num_accepted_tokens=accepted)
    if accepted is not None:
        _check_rows("num_accepted_tokens", accepted, n, device, 1)
        accepted = accepted[:n]
    if is_table:
        name, last = (given.name, given.slots) if targets is None else (given.final_name, targets)
        if min(last.shape[1], given.slots.shape[1]) < 1 or last.shape[1] < rows.length:
            raise ValueError(f"{name}: expected at least {max(rows.length, 1)} columns, got {last.shape[1]}")
    found = replace(given, slots=given.slots[:n], final_slots=targets, accepted=accepted)
    if device.type == "cpu":
        check_contents(rows, num_tokens, found)
    return found


def advance_slots(
    run: Operation[AnyInputs],
    inputs: AnyInputs,
    rows: EngineRows,
    given: Slots,
    o: Tensor | None = None,
    *,
    chunked: bool = False,
) -> Tensor:
    """Check `given` and run the rows; return o `[T, HV, V]`, zero for skipped rows, unspecified for tokens of no row.

    `chunked`, without tables alone, and o: as for `advance`.

    Does not wait for a GPU. Of tables the state is kept in fp32 from token to token. A row of more tokens than there
    are columns is skipped. One without tokens leaves its state where it goes, if that is elsewhere.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    found = check_slots(rows, given, inputs.num_tokens)
    targets = found.slots if found.final_slots is None else found.final_slots
    rows = replace(rows, read_line=found.slots, num_accepted=found.accepted, pad=found.pad, moves=found.moves)
    rows = replace(rows, token_lines=targets) if found.is_table else replace(rows, write_line=targets)
    return advance(run, inputs, found.pool, rows, written=found.written, keep=found.keep, chunked=chunked, o=o)


def _check_rows(name: str, tensor: Tensor, num_rows: int, device: torch.device, ndim: int) -> None:
    """Check integers `(rows,)` or, of two dimensions, `(rows, columns)`."""
    shape: dict[str, int | None] = {"rows": None, "columns": None} if ndim == 2 else {"rows": None}
    check_operand(name, tensor, shape, INTEGERS, device, beside=None)
    if tensor.shape[0] < num_rows:
        raise ValueError(f"{name}: expected at least {num_rows} rows, got {tensor.shape[0]}")


def check_contents(rows: EngineRows, num_tokens: int, given: Slots | None = None) -> None:
    """Check what the tensors say; waits for the device.

    Raises:
        ValueError: offsets that fall or leave the tokens, a row longer than its table, a slot out of range, or one that
            a row writes and another one uses. What is said of rows that are empty or skipped is not checked.
    """
    check_offsets(rows, num_tokens, "cu_seqlens")
    if given is None:
        return
    n, pad = rows.num_rows, given.pad
    starts = [i * rows.length for i in range(n + 1)] if rows.starts is None else rows.starts.tolist()
    table = _list_rows(given.slots)
    targets = table if given.final_slots is None else _list_rows(given.final_slots)
    counts = [1] * n if given.accepted is None else given.accepted.tolist()
    used: list[tuple[int, list[int]]] = []
    for i in range(n):
        length = starts[i + 1] - starts[i]
        if length == 0 and (given.is_table or not given.moves):
            continue
        if given.is_table and length > len(targets[i]):
            raise ValueError(f"cu_seqlens: expected rows of at most {len(targets[i])} tokens, got {length} in row {i}")
        begin = table[i][min(max(counts[i] - 1, 0), len(table[i]) - 1)]
        kept = [slot for slot in targets[i][: length if given.is_table else 1] if slot >= 0 and slot != pad]
        is_whole = given.final_slots is not None or len(kept) == (length if given.is_table else 1)
        if begin >= 0 and begin != pad and is_whole:
            used.append((begin, kept if given.keep else []))
    name = given.name if given.final_slots is None else given.final_name
    if given.written is None and given.final_slots is None:
        check_lines(name, "slot", used, given.pool.shape[0])
        return
    check_lines(given.name, "slot", [(begin, []) for begin, _ in used], given.pool.shape[0])
    pool = given.pool if given.written is None else given.written
    apart = [(None if given.written is not None else begin, kept) for begin, kept in used]
    check_lines(name, "slot", apart, pool.shape[0])


def _list_rows(slots: Tensor) -> list[list[int]]:
    """Return the slots of each row."""
    found: list[list[int]] = slots.tolist() if slots.ndim == 2 else slots[:, None].tolist()
    return found
