"""The cases of attention over pages of keys: decode with modifiers, ours beside PyTorch's."""

from deltaline_bench.attention.cases import SUITE

__all__ = ["SUITE"]
