"""The mixers: of each kind what a checkpoint holds for it, and its computation."""
