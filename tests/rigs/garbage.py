"""What is left to Python's garbage collector: circles of objects, which nothing else frees."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_left(*modules: str) -> Iterator[None]:
    """The block leaves it no object of a type of these modules."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        left = {f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage}
        assert {name for name in left if name.startswith(modules)} == set()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
