"""Tokens and lines of a convolution as engines pass them: checked, and as the kernels have them."""

import torch
from torch import Tensor

from deltaline_kernels.compat.arguments import INTEGERS, EngineRows, check_indices, check_operand


def pack_columns(x: Tensor, *, validate: bool) -> Tensor:
    """Return packed x `(dim, tokens)` as `[T, D]` with contiguous channels, a copy unless x has them."""
    check_operand("x", x, {"dim": None, "tokens": None})
    if _has_contiguous_channels(x):
        return x.t()
    if validate:
        raise ValueError(
            "x: expected contiguous channels (x.stride(0) == 1), as in the transpose of a [tokens, dim] tensor, "
            f"got strides {x.stride()}"
        )
    return x.t().contiguous()


def unpack_columns(y: Tensor, x: Tensor) -> Tensor:
    """Return y `[T, D]` as packed x is, with its order of memory."""
    return y.t() if _has_contiguous_channels(x) else torch.empty_like(x).copy_(y.t())


def _has_contiguous_channels(x: Tensor) -> bool:
    return x.shape[0] <= 1 or x.stride(0) == 1


def pack_tokens(x: Tensor, query_start_loc: Tensor | None) -> tuple[Tensor, int, int]:
    """Return x as `[T, D]` with contiguous channels, its rows, and their tokens (0: query_start_loc tells)."""
    if query_start_loc is not None:
        check_operand("x", x, {"tokens": None, "dim": None})
        tokens, num_rows, length = x, 0, 0
    elif isinstance(x, Tensor) and x.ndim == 3:
        check_operand("x", x, {"batch": None, "dim": None, "n": None})
        num_rows, dim, length = x.shape
        tokens = x.transpose(1, 2).reshape(num_rows * length, dim)
    else:
        check_operand("x", x, {"batch": None, "dim": None})
        tokens, num_rows, length = x, x.shape[0], 1
    return tokens if tokens.shape[1] <= 1 or tokens.stride(1) == 1 else tokens.contiguous(), num_rows, length


def unpack_tokens(y: Tensor, x: Tensor) -> Tensor:
    """Return y `[T, D]` in x's shape."""
    return y if x.ndim == 2 else y.view(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)


def pick_lines(
    indices: Tensor | None,
    read_blocks: Tensor | None,
    write_blocks: Tensor | None,
    device: torch.device,
    *,
    validate: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the line that each row reads and writes, -1 for a block that its table lacks; None: row i has line i."""
    name = "conv_state_indices"
    is_table = isinstance(indices, Tensor) and indices.ndim == 2
    if indices is not None:
        check_operand(name, indices, {"batch": None, "blocks": None} if is_table else {"batch": None}, INTEGERS, device)
        if is_table and indices.shape[1] == 0:
            raise ValueError(f"{name}: expected at least one block per row, got a table {tuple(indices.shape)}")
    if read_blocks is None and write_blocks is None:
        lines = indices[:, 0] if indices is not None and is_table else indices
        return lines, lines
    if indices is None or not is_table:
        raise ValueError(f"{name}: expected a table (batch, blocks) beside the blocks to read and write, got none")
    if read_blocks is None or write_blocks is None:
        missing = "initial_state_idx" if read_blocks is None else "block_idx_last_scheduled_token"
        raise ValueError(f"{missing}: expected a tensor, as the other of the two is given, got None")
    told = {"initial_state_idx": read_blocks, "block_idx_last_scheduled_token": write_blocks}
    last = indices.shape[1] - 1
    for name, blocks in told.items():
        check_indices(name, blocks, device, indices.shape[0])
        if validate and not ((blocks >= 0) & (blocks <= last)).all():
            raise ValueError(f"{name}: expected blocks of 0..{last}, got {blocks.tolist()}")
    chosen = torch.stack([blocks.to(torch.int64) for blocks in told.values()], dim=1)
    inside = chosen.clamp(0, last)
    lines = indices.gather(1, inside).masked_fill_(chosen != inside, -1)
    return lines[:, 0], lines[:, 1]


def find_sequences(seq_idx: Tensor, *, history: bool) -> EngineRows:
    """Return the runs of equal numbers in each of a batch `(batch, tokens)` as rows, without waiting for the device.

    A token could begin each: those that there are not are empty rows. Runs of numbers below 0 are skipped; with
    `history` the first ones of each of the batch begin behind its line.
    """
    length = seq_idx.shape[1]
    numbers = seq_idx.flatten()
    num_tokens = numbers.shape[0]
    token = torch.arange(num_tokens, device=seq_idx.device)
    begins = (numbers != numbers.roll(1)) | (token % length == 0)
    starts = torch.where(begins, token, num_tokens).sort().values
    first = starts.clamp(max=num_tokens - 1)
    lines = torch.where(numbers[first] < 0, -1, first // length)
    behind = first % length == 0 if history else False
    starts = torch.cat((starts, starts.new_full((1,), num_tokens)))
    return EngineRows(num_tokens, length, 0, starts, lines, lines, -1, behind, None)
