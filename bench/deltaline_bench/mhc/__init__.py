"""The cases of hyper-connections: post, pre, both at once and the head, ours beside FlagGems'."""

from deltaline_bench.mhc.cases import SUITE

__all__ = ["SUITE"]
