"""A gRPC port: what its clients may make this process hold, and the descriptors that their connections leave."""
