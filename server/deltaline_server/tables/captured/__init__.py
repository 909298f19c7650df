"""Captured states of sequences: how they are made and gone on from, and the snapshots that hold them."""
