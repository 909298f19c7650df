"""The cases of causal_conv1d: prefill, update and verify, ours beside the field's kernels."""

from deltaline_bench.conv1d.cases import SUITE

__all__ = ["SUITE"]
