"""Tiles of tokens that have the same key, on the CPU."""

import torch
from torch import Tensor


def group_cpu(keys: Tensor, num_keys: int, tile_keys: Tensor, tile_tokens: Tensor) -> None:
    """Write the tiles of tokens by their keys `[T]` int32; a token whose key is not in 0..num_keys-1 is in none.

    Args:
        tile_keys: `[tiles]` int32, the keys in rising order, -1 behind the last tile.
        tile_tokens: `[tiles, rows]` int32, numbers of tokens in rising order, -1 elsewhere.
    """
    rows = tile_tokens.shape[1]
    tile_keys.fill_(-1)
    tile_tokens.fill_(-1)
    order = torch.argsort(keys, stable=True)
    found, counts = torch.unique_consecutive(keys[order], return_counts=True)
    tile, first = 0, 0
    for key, count in zip(found.tolist(), counts.tolist(), strict=True):
        if 0 <= key < num_keys:
            num_own = -(-count // rows)
            tile_keys[tile : tile + num_own] = key
            own = order[first : first + count]
            tile_tokens[tile : tile + num_own].view(-1)[:count] = own.to(torch.int32)
            tile += num_own
        first += count
