"""The device thread and what computes a batch on a device: copies, streams and CUDA graphs."""
