"""Channels, streams, statuses and retries: how a message reaches the server and comes back."""
