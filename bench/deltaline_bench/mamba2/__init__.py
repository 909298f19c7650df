"""The cases of mamba2: prefill, decode and verify, ours beside the field's kernels."""
