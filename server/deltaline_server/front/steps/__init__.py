"""Steps as they come from the wire: their messages, found without a copy, what these name, how they are answered."""
