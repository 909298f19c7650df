"""LoRA of many adapters in one batch: each token's adapter is added to the outputs of a projection, in place."""

from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.checks import ACTIVATIONS, check_positive, check_tensor
from deltaline_kernels.cpu.group import group_cpu
from deltaline_kernels.device.sizes import count_tiles
from deltaline_kernels.lora.cpu import add_lora_cpu, spread_slots_cpu
from deltaline_kernels.lora.plan import tile_rows
from deltaline_kernels.lora.reference import add_lora_reference, spread_slots_reference
from deltaline_kernels.lora.tiles import AdapterTiles
from deltaline_kernels.lora.weights import MAX_RANK, LoraWeights
from deltaline_kernels.operators import operator

__all__ = [
    "MAX_RANK",
    "AdapterTiles",
    "LoraWeights",
    "add_lora",
    "add_lora_reference",
    "group_tokens",
    "spread_slots",
    "spread_slots_reference",
]


def _fake_spread(row_slots: Tensor, num_tokens: int, **_: Any) -> Tensor:
    return row_slots.new_empty(num_tokens)


def _fake_tiles(token_slots: Tensor, num_slots: int, max_rank: int) -> tuple[Tensor, Tensor]:
    rows = tile_rows(token_slots.shape[0], max_rank)
    num_tiles = count_tiles(token_slots.shape[0], num_slots, rows)
    return token_slots.new_empty(num_tiles), token_slots.new_empty(num_tiles, rows)


def _fake_nothing(**_: Any) -> None:
    pass


@operator(_fake_spread)
def spread_slots(row_slots: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Return the slot of each token `[T]` int32: its row's, or -1 behind the last row.

    Does not wait for the device.

    Args:
        row_slots: `[N]` int32, contiguous, the slot of each row's adapter.
        query_start_loc: `[N+1]` int32, contiguous, where rows start in packed tokens; from 0, rows may be empty.
        num_tokens: T.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    check_tensor("row_slots", row_slots, (None,), (torch.int32,), None)
    device = row_slots.device
    check_tensor("query_start_loc", query_start_loc, (row_slots.shape[0] + 1,), (torch.int32,), device)
    if not isinstance(num_tokens, int):
        raise TypeError(f"num_tokens: expected an integer, got {type(num_tokens).__name__}")
    if num_tokens < 0:
        raise ValueError(f"num_tokens: expected at least 0, got {num_tokens}")
    token_slots = torch.empty((num_tokens,), dtype=torch.int32, device=device)
    if num_tokens > 0:
        if device.type == "cpu":
            spread_slots_cpu(row_slots, query_start_loc, token_slots)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.lora.spread import spread_slots_triton

            spread_slots_triton(row_slots, query_start_loc, token_slots)
    return token_slots


def group_tokens(token_slots: Tensor, num_slots: int, max_rank: int = MAX_RANK) -> AdapterTiles:
    """Sort the tokens of a batch by adapter; neither waits for the device nor depends on what `token_slots` holds.

    Args:
        token_slots: `[T]` int32, contiguous, the slot of each token's adapter; every value outside 0..num_slots-1, such
            as -1, stands for none.
        num_slots: of the weights that the tiles are used with.
        max_rank: of these weights. By it tiles have their size: with another one other kernels may run, which cost time
            and add up in another order, so that outputs may differ in the last bit.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    slots, tokens = _group_tokens(token_slots, num_slots, max_rank)
    return AdapterTiles(slots, tokens, token_slots.shape[0], num_slots)


@operator(_fake_tiles, results=2, name="group_tokens")
def _group_tokens(token_slots: Tensor, num_slots: int, max_rank: int) -> tuple[Tensor, Tensor]:
    """Return the tensors of the tiles."""
    check_tensor("token_slots", token_slots, (None,), (torch.int32,), None)
    device = token_slots.device
    check_positive("num_slots", num_slots)
    check_positive("max_rank", max_rank)
    num_tokens = token_slots.shape[0]
    rows = tile_rows(num_tokens, max_rank)
    num_tiles = count_tiles(num_tokens, num_slots, rows)
    slots = torch.empty((num_tiles,), dtype=torch.int32, device=device)
    tokens = torch.empty((num_tiles, rows), dtype=torch.int32, device=device)
    if num_tiles > 0:
        if device.type == "cpu":
            group_cpu(token_slots, num_slots, slots, tokens)
        else:
            # Imported here: only this path needs triton, which is installed on Linux alone.
            from deltaline_kernels.device.group import group_triton

            group_triton(token_slots, num_slots, slots, tokens)
    return slots, tokens


@operator(_fake_nothing, mutates=["out"], results=0)
def add_lora(x: Tensor, out: Tensor, weights: LoraWeights, tiles: AdapterTiles) -> None:
    """Add to each token's outputs what its adapter adds, rounded once; tokens without an adapter stay as they are.

        out[t, n] = factor[n] (out[t, n] + scale sum over r of (sum over k of x[t, k] A[r, k]) B[r, n])

    Args:
        x: `[T, in]` in the dtype of the weights, a row stride is fine.
        out: `[T, out]` fp32, bf16 or fp16, a row stride is fine. Mutated: the slices whose rank is above 0. Must not
            overlap x or the weights.
        weights: of the slots; the sums are fp32.
        tiles: of these tokens and slots, see `group_tokens`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was got.
    """
    if not isinstance(weights, LoraWeights):
        raise TypeError(f"weights: expected LoraWeights, got {type(weights).__name__}")
    if not isinstance(tiles, AdapterTiles):
        raise TypeError(f"tiles: expected AdapterTiles, got {type(tiles).__name__}")
    device = weights.a.device
    check_tensor("x", x, (None, weights.num_inputs), (weights.a.dtype,), device, row_stride=True)
    check_tensor("out", out, (x.shape[0], weights.num_outputs), ACTIVATIONS, device, row_stride=True)
    if tiles.tokens.device != device:
        raise ValueError(f"tiles: expected device {device}, got {tiles.tokens.device}")
    if (tiles.num_tokens, tiles.num_slots) != (x.shape[0], weights.num_slots):
        raise ValueError(
            f"tiles: expected those of {x.shape[0]} tokens and {weights.num_slots} slots, "
            f"got those of {tiles.num_tokens} and {tiles.num_slots}"
        )
    if tiles.num_tiles == 0:
        return
    if device.type == "cpu":
        add_lora_cpu(x, out, weights, tiles)
    else:
        # Imported here: only this path needs triton, which is installed on Linux alone.
        from deltaline_kernels.lora.launch import add_lora_triton

        add_lora_triton(x, out, weights, tiles)
