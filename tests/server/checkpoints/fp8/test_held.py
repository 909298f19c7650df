"""Where served weights have whole blocks of the stored ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.quantised import BLOCK

from deltaline_server.checkpoints.fp8.held import served_blocks
from deltaline_server.checkpoints.modules import Module, Packed, Placement

PLACE = Placement(torch.device("cpu"), torch.float32)
IN, OUT = Packed.IN_PROJ, Packed.OUT_PROJ
# A module, ranks, the stored block, and whether it can stay in FP8.
CASES: dict[str, tuple[Module, int, tuple[int, int], bool]] = {
    "whole": (Module("a", IN, 200, 300, (200,)), 1, BLOCK, True),
    "rows-on-borders": (Module("a", IN, 768, 300, (256, 512)), 2, BLOCK, True),
    "rows-off-borders": (Module("a", IN, 640, 300, (128, 512)), 2, BLOCK, False),
    "off-borders-on-one-rank": (Module("a", IN, 384, 300, (384,)), 2, BLOCK, False),
    "columns-on-borders": (Module("a", OUT, 200, 512, (200,), shares_columns=True), 4, BLOCK, True),
    "columns-off-borders": (Module("a", OUT, 200, 320, (200,), shares_columns=True), 2, BLOCK, False),
    "whole-on-all-ranks": (Module("a", OUT, 200, 300, (200,), is_whole=True), 3, BLOCK, True),
    "groups-of-whole-blocks": (Module("a", IN, 1024, 70, (128, 256, 128), groups=2), 2, BLOCK, True),
    "groups-of-parts-of-blocks": (Module("a", IN, 512, 70, (64, 128, 64), groups=2), 1, BLOCK, False),
    "heads-that-ranks-have-twice": (Module("a", IN, 256, 70, (256,), heads=(2,)), 4, BLOCK, True),
    "one-scale": (Module("a", IN, 642, 301, (2, 640)), 2, (642, 301), True),
    "larger-blocks": (Module("a", IN, 512, 512, (512,)), 2, (256, 512), True),
    "smaller-blocks": (Module("a", IN, 128, 128, (128,)), 1, (64, 128), False),
    "a-smaller-block-that-is-alone": (Module("a", IN, 64, 64, (64,)), 1, (64, 64), True),
}


@pytest.mark.parametrize("case", CASES)
def test_scales_are_those_of_the_values_on_every_rank(case: str) -> None:
    module, world_size, block, fits = CASES[case]
    grid = -(-module.rows // block[0]), -(-module.columns // block[1])
    scales = torch.randn(grid)
    row, column = torch.arange(module.rows) // block[0], torch.arange(module.columns) // block[1]
    of_values = scales[row[:, None], column]
    for rank in range(world_size):
        place = replace(PLACE, rank=rank, world_size=world_size)
        found = served_blocks(module, block, place)
        assert (found is not None) == fits
        if found is not None:
            served = found.of(scales).repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = module.served_shape(world_size)
            expected = module.order(of_values.__getitem__, place)[:, module.columns_of(place)]
            assert torch.equal(served[:rows, :columns], expected)
