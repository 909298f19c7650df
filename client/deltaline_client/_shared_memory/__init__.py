"""Memory that a client of the same host shares with the server."""
