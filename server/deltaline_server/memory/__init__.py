"""Memory that crosses borders: shared with clients, or pinned for the device."""
