"""The cases of LoRA: shrink and expand of many adapters in one batch, ours beside vLLM's."""
