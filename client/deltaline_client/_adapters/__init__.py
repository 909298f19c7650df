"""The server's adapters as a client sees them: loaded, listed, unloaded."""
