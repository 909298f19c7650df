"""The fake server that the client's tests talk to, and both clients on it."""

from rigs.running_sum import driven, server

__all__ = ["driven", "server"]
