"""The field's kernels of hyper-connections. Knows no figures and no bars."""

from __future__ import annotations

from deltaline_bench.case import SideMaker
from deltaline_bench.mhc.batch import Batch
from deltaline_bench.mhc.sides import field_side
from deltaline_bench.peers import Peers

FLAG_GEMS = "flag_gems.fused.mhc"


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    return {
        "FlagGems": lambda: field_side(
            batch,
            found.load(f"{FLAG_GEMS}.mhc_post", "mhc_post"),
            found.load(f"{FLAG_GEMS}.mhc_pre", "mhc_pre"),
        )
    }
