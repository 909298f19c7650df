"""The cases of mamba2: prefill, decode and verify, ours beside the field's kernels."""

from deltaline_bench.mamba2.cases import SUITE

__all__ = ["SUITE"]
