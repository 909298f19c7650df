"""Triton that several families inline: tiles of states and tokens, gates, splits of rows."""
