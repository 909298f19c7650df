"""The fake server that the client's tests talk to, and both clients on it; and more servers, to be followed to."""

from rigs.followed import clients, other, third
from rigs.running_sum import driven, once, server

__all__ = ["clients", "driven", "once", "other", "server", "third"]
