"""Stored states: captured in the order of a sequence's steps, and begun from."""
