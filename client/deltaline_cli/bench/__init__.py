"""`deltaline bench`: load of a server, closed or open loop, and what its steps took."""
