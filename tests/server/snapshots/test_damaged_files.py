"""Damaged and foreign files: none is taken for a state, each has a named flaw, and the good one beside is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.damaged_states import KINDS, MEMORY, SPOILS, put_damaged, whole_file
from rigs.states import FINGERPRINT, LAYOUT, make_header

from deltaline_server.snapshots.directory import StateDirectory, name_of
from deltaline_server.snapshots.files import FileTier, Miss
from deltaline_server.snapshots.header import Flaw
from deltaline_server.snapshots.layout import SpanProgress

GOOD = 10**9
NUM_CLASSES = len(SPOILS) + len(KINDS)


def put_files(folder: Path, numbers: range) -> list[set[Flaw]]:
    """Put damaged files beside a good one; return which flaws each may be told to have."""
    folder.mkdir(mode=0o700)
    elsewhere = folder.parent / "good"
    elsewhere.write_bytes(whole_file(GOOD + 1))
    (folder / name_of(make_header(GOOD).id)).write_bytes(whole_file(GOOD))
    return [put_damaged(folder, elsewhere, number) for number in numbers]


async def check_damaged(tmp_path: Path, numbers: range) -> Counter[Flaw]:
    """Look at damaged files as a server does; return which flaws they had."""
    folder = tmp_path / "states"
    expected = put_files(folder, numbers)
    tier = FileTier(StateDirectory(folder), LAYOUT, FINGERPRINT, 1 << 40)
    memory = np.empty(len(MEMORY), dtype=np.uint8)
    found = await tier.find_all()
    for header in found:
        miss = await tier.load(header.id, memory)
        assert (miss is None) == (header == make_header(GOOD)), header
    assert (await tier.load(make_header(GOOD).id, memory)) is None and (memory == MEMORY).all()
    await tier.close()
    assert tier.flaws.total() == len(numbers) and tier.misses == Counter({Miss.DAMAGED: tier.flaws[Flaw.DIGEST]})
    for flaw, count in tier.flaws.items():
        assert sum(flaws == {flaw} for flaws in expected) <= count <= sum(flaw in flaws for flaws in expected)
    return tier.flaws


async def test_damaged_and_foreign_files_are_named_and_not_taken(tmp_path: Path) -> None:
    flaws = await check_damaged(tmp_path, range(12 * NUM_CLASSES))
    assert flaws.keys() == set(Flaw) - {Flaw.GONE, Flaw.UNREADABLE, Flaw.BUSY}


@pytest.mark.parametrize("number", range(NUM_CLASSES))
async def test_each_way_of_damage_has_its_flaw(tmp_path: Path, number: int) -> None:
    await check_damaged(tmp_path, range(number, number + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": b"k" * 15}, "key: expected 16 .. 64 bytes, got 15"),
        ({"spans": (SpanProgress(position=2**40 + 1),)}, "key: expected none for so many tokens"),
        ({"created_ns": -1}, "created_ns: expected 0 or more, got -1"),
    ],
)
def test_a_header_says_nothing_that_no_snapshot_has(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_header(**changes)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
async def test_10000_damaged_and_foreign_files(tmp_path: Path, part: int) -> None:
    await check_damaged(tmp_path, range(part * 1000, part * 1000 + 1000))
