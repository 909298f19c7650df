"""The fake server that the tests of the command talk to."""

from rigs.running_sum import server

__all__ = ["server"]
