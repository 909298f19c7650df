"""What a server with given options would take, without starting it."""
