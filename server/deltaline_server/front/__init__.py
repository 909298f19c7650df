"""What speaks gRPC: services, what surrounds their calls, and the messages of steps, parsed and answered."""
