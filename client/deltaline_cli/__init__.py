"""The command `deltaline`."""
