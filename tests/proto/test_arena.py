"""The arena: arrays that never overlap, and memory that comes back when they are dropped."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltaline.arena import ALIGNMENT, Arena

SIZE = 1 << 16


@pytest.fixture
def arena() -> Arena:
    return Arena(mmap.mmap(-1, SIZE))


def whole(arena: Arena) -> bool:
    """Whether all memory is free again, in one piece."""
    return arena.empty([SIZE], np.uint8) is not None


def test_arrays_are_aligned_writable_and_apart(arena: Arena) -> None:
    rng = np.random.default_rng(0)
    held: dict[int, NDArray[Any]] = {}
    num_full = 0
    for number in range(1, 1500):
        if held and rng.random() < 0.48:
            del held[list(held)[int(rng.integers(len(held)))]]
            continue
        array = arena.empty((int(rng.integers(1, 40)), int(rng.integers(1, 60))), np.float32)
        if array is None:
            num_full += 1
            held.pop(next(iter(held)))
            continue
        array[:] = number
        held[number] = array
        offset = arena.offset(array)
        assert offset is not None and offset % ALIGNMENT == 0
        for value, other in held.items():
            assert (other == value).all()
    assert num_full > 10
    held.clear()
    del array, other
    assert whole(arena)


def test_a_block_lives_as_long_as_any_view_of_it(arena: Arena) -> None:
    array = arena.empty((SIZE // 8, 4), np.float16)
    assert array is not None and arena.empty((1,), np.uint8) is None
    row = array[3:5].view(np.uint16)[1]
    del array
    assert arena.empty((1,), np.uint8) is None
    del row
    assert whole(arena)


def test_an_array_is_found_by_its_address(arena: Arena) -> None:
    array = arena.empty((8, 16), np.float32)
    assert array is not None
    begin = arena.offset(array)
    assert begin is not None
    assert arena.offset(array[3:]) == begin + 3 * 64
    assert arena.offset(array.reshape(-1)[8:]) is None  # not aligned
    assert arena.offset(array[:, :8]) is None  # not contiguous
    assert arena.offset(array.copy()) is None
    assert arena.offset(np.zeros((1, 16), np.float32)) is None


def test_a_part_of_a_mapping_hands_out_nothing_else() -> None:
    mapping = mmap.mmap(-1, SIZE)
    first, second = Arena(mapping, 0, SIZE // 4 + 1), Arena(mapping, SIZE // 4)
    one, other = first.empty([SIZE // 4], np.uint8), second.empty([SIZE // 4 * 3], np.uint8)
    assert one is not None and other is not None
    assert first.empty([1], np.uint8) is None and second.empty([1], np.uint8) is None
    assert (first.offset(one), first.offset(other)) == (0, SIZE // 4) == (second.offset(one), second.offset(other))
    del one
    assert second.empty([1], np.uint8) is None and first.empty([1], np.uint8) is not None


def test_empty_arrays_and_arrays_too_large(arena: Arena) -> None:
    nothing = arena.empty((0, 16), np.float32)
    assert nothing is not None and nothing.shape == (0, 16) and arena.offset(nothing) == 0
    assert arena.empty((SIZE + 1,), np.uint8) is None
    assert arena.empty((2**40, 2**40), np.float32) is None


def test_threads_share_an_arena(arena: Arena) -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        held: list[NDArray[Any]] = []
        for _ in range(500):
            array = arena.empty((int(rng.integers(1, 400)),), np.int32)
            if array is not None:
                array[:] = number
                held.append(array)
            if len(held) > 6 or array is None:
                held = held[3:]
            if any((one != number).any() for one in held):
                faults.append(f"thread {number} found another's numbers")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert whole(arena)
