"""The field's kernels of hyper-connections. Knows no figures and no bars."""

from __future__ import annotations

from deltaline_bench.case import SideMaker
from deltaline_bench.mhc.batch import Batch
from deltaline_bench.mhc.sides import Function, field_side
from deltaline_bench.peers import Peers

FLAG_GEMS = "flag_gems.fused.mhc"


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    return {"FlagGems": lambda: field_side(batch, found.load(f"{FLAG_GEMS}.mhc_post", "mhc_post"), _pre(found))}


def _pre(found: Peers) -> Function:
    """FlagGems' mhc_pre, able to find the weight that it has cast before: its own cache, whose weak keys are tensors,
    compares them by value and raises without gradients."""
    pre: Function = found.load(f"{FLAG_GEMS}.mhc_pre", "mhc_pre")
    getattr(pre, "__globals__", {})["_FN_BF16_CACHE"] = {}
    return pre
