"""What speaks gRPC: services, what surrounds their calls, requests checked (sizes, deadlines), replies written."""
