"""The layers in PyTorch and our kernels, and the tensors that hold their state."""
