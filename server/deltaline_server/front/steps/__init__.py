"""Steps as they come from the wire: their messages, found without a copy, what these name, and how they are answered."""
