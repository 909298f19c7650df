"""The cases of mixtures of experts: routing and experts of whole layers, ours beside the field's."""
