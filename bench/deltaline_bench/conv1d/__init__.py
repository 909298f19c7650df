"""The cases of causal_conv1d: prefill, update and verify, ours beside the field's kernels."""
