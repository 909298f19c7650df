"""Steps as they come from the wire: their messages, found without a copy, and what these name."""
