"""The processes that share a model: their places, how they start, meet, exchange tensors, and end together."""
