"""Adapters of batches: those that a batch takes, and the rows that wait for theirs."""
