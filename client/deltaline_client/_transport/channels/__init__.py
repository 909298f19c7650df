"""gRPC: channels to servers, and the stream of steps on each."""
