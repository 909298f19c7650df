"""The cases of gated_delta: prefill, decode, the mixer around it and verify, ours beside the field's kernels."""
