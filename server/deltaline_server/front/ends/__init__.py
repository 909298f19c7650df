"""Front ends: processes that speak gRPC and hold no state; their calls come to this one over the link."""
