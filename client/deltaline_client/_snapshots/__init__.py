"""Snapshots of sequences, and sequences that go on from them."""
