"""A group of ranks, measured on the GPUs of one host: sums, what rank 0 tells, and whole layers beside one GPU's."""
