"""The cases of kda: prefill, decode and verify, ours beside the field's kernels."""
