"""Files of a checkpoint: the configuration and the tensors, read and checked."""
