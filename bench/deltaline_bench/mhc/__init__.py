"""The cases of hyper-connections: post, pre, both at once and the head, ours beside FlagGems'."""
