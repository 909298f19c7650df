"""Weights in FP8: what a config says of them, and how they are read, as what they stand for or as they are stored."""
