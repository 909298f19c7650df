"""Sequences as arrays by slot: handles, leases, progress, kept replies, lines, pages and adapters."""
