"""Where a process finds its place among ranks: what torchrun sets."""

from __future__ import annotations

import pytest

from deltaline_server.ranks.place import Place, PlaceError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "leader",
    "MASTER_PORT": "29500",
}


def test_place_is_what_torchrun_says() -> None:
    assert Place.find(TORCHRUN) == Place(5, 8, 1, 4, "leader", 29500)
    assert Place.find({}) is None and Place.find({"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_place_is_told_as_it_is_found() -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", 4711, 9)
    assert Place.find(place.variables()) == place


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RANK", "8", "RANK: expected 0 .. 7, got '8'"),
        ("LOCAL_RANK", "4", "LOCAL_RANK: expected 0 .. 3, got '4'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE: expected 1 .. 65536, got 'two'"),
        ("MASTER_PORT", "0", "MASTER_PORT: expected 1 .. 65535, got '0'"),
    ],
)
def test_place_that_cannot_be_is_refused(name: str, value: str, told: str) -> None:
    with pytest.raises(PlaceError) as refused:
        Place.find(TORCHRUN | {name: value})
    assert str(refused.value) == told
