"""Python's garbage collector: while it looks for circles of objects everything waits."""

from __future__ import annotations

import gc

# Objects that came and did not go, before it looks at them: 700 by itself. Answered calls leave it nothing of ours, and
# what waits in calls is looked at in vain.
THRESHOLD = 10_000


def settle() -> None:
    """Let it look no more at what is there now, which stays, and seldom at what comes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
