"""The cases of LoRA: shrink and expand of many adapters in one batch, ours beside vLLM's."""

from deltaline_bench.lora.cases import SUITE

__all__ = ["SUITE"]
