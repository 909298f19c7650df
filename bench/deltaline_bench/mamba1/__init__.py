"""The cases of mamba1: prefill, decode and verify, ours beside the field's kernels."""
