"""Sequences that go on at another server: which may take them, and how each goes there."""
