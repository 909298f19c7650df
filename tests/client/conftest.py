"""The fake server that the client's tests talk to, and both clients on it."""

from rigs.running_sum import driven, once, server

__all__ = ["driven", "once", "server"]
