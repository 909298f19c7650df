"""A served model: its configuration, its spans of layers, their weights and the adapters that are added to these."""
