"""The cases of attention over pages of keys: decode with modifiers, ours beside PyTorch's."""
