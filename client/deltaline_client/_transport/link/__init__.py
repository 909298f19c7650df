"""The local link, the client's side: calls and steps over a socket to a server of this host."""
