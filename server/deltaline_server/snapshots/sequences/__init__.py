"""Sequences as they stand between two steps: taken whole into host memory, and opened from there."""
