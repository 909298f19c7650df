"""Places of one memory: none overlap, none are lost, and what is given back is whole again."""

from __future__ import annotations

import numpy as np
import pytest

from deltaline_server.snapshots.places import GRANULE, Places


def test_memory_is_cut_into_places_of_one_size() -> None:
    places = Places(4 * 2 * GRANULE + 100)
    offsets = [places.take(2 * GRANULE - 5) for _ in range(5)]
    assert offsets == [0, 2 * GRANULE, 4 * GRANULE, 6 * GRANULE, None]
    assert places.used_bytes == places.num_bytes == 8 * GRANULE
    places.give_back(4 * GRANULE)
    assert places.take(2 * GRANULE) == 4 * GRANULE
    with pytest.raises(KeyError):
        places.give_back(GRANULE)


def test_random_places_are_as_in_a_model_of_granules() -> None:
    rng = np.random.default_rng(6)
    places, size = Places(64 * GRANULE), 64
    owner = np.full(size, -1)
    taken: dict[int, int] = {}
    for number in range(4000):
        if taken and rng.random() < 0.5:
            offset = int(rng.choice(list(taken)))
            places.give_back(offset)
            owner[owner == taken.pop(offset)] = -1
        else:
            count = int(rng.integers(1, 20))
            got = places.take(count * GRANULE - int(rng.integers(GRANULE)))
            fits = next((i for i in range(size - count + 1) if (owner[i : i + count] == -1).all()), None)
            assert got == (None if fits is None else fits * GRANULE)
            if fits is not None:
                owner[fits : fits + count] = number
                taken[fits * GRANULE] = number
        places.check_integrity()
        assert places.used_bytes == int((owner >= 0).sum()) * GRANULE
    for offset in taken:
        places.give_back(offset)
    assert places.take(size * GRANULE) == 0
