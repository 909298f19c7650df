"""A whole model: what a decode and a prefill take, beside their bytes and beside their products alone."""
