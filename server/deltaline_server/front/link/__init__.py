"""The local link: the services' calls over a UNIX socket of this host, beside gRPC and through the same handlers."""
