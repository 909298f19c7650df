"""Stored states: what is kept of a sequence, in which bytes, and where it lies."""
