"""Snapshots are found by the keys of a prompt, and sequences begin with what is found."""

from __future__ import annotations

import pytest
from rigs.scheduler_rig import DECODE, PREFILL, Rig, checksum, outputs, refuses

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS, Principal
from deltaline_server.tables.open_tokens import Opened
from deltaline_server.tables.prefixes.cost import ReusePolicy
from deltaline_server.tables.prefixes.index import Miss
from deltaline_server.tables.prefixes.keys import PrefixKeys
from deltaline_server.tables.prefixes.match import Match

ONE, OTHER = Principal(1, "one"), Principal(2, "other")
PROMPT = [float(i) for i in range(1, 11)]


def key(tokens: list[float]) -> bytes:
    return repr(tokens).encode().ljust(64, b"x")[:64]


def keys(prompt: list[float] = PROMPT) -> PrefixKeys:
    ends = range(1, len(prompt) + 1)
    return PrefixKeys.of([key(prompt[:end]) for end in ends], list(ends), len(prompt))


def find(rig: Rig, prompt: list[float] = PROMPT, adapter_hash: bytes = b"", principal: Principal = ANONYMOUS) -> Match:
    return rig.states.find(keys(prompt), adapter_hash, principal, ReusePolicy.ALWAYS)


async def stored(rig: Rig, length: int, lease_s: float | None = None, is_pinned: bool = False) -> bytes:
    """The id of a snapshot of the prompt's first tokens, under their key."""
    (handle,) = rig.open()
    await rig.step((handle, PREFILL, 1, 0, -1, PROMPT[:length]))
    (made,) = await rig.snapshot(handle, keys=[key(PROMPT[:length])], lease_s=lease_s, is_pinned=is_pinned)
    rig.close(handle)
    return made.id


def make_rig() -> Rig:
    return Rig(snapshot_lines=2, pages=60)


async def test_the_deepest_state_before_the_end_is_found_and_restored() -> None:
    rig = make_rig()
    await stored(rig, 5)
    deep = await stored(rig, 8)
    found = find(rig)
    assert found.prefix is not None and (found.prefix.snapshot, found.prefix.position) == (deep, 8)
    assert (found.restore_s, found.compute_s, found.miss) == (0.0, None, None)
    (child,) = rig.restore(found.prefix.snapshot)
    assert outputs(await rig.step((child, DECODE, 1, 8, -1, [9.0]))) == [checksum(PROMPT[:9])]


async def test_misses_have_their_reasons() -> None:
    rig = make_rig()
    assert find(rig).miss is Miss.NEVER_STORED
    first = await stored(rig, 5, lease_s=1.0)
    assert find(rig, PROMPT[:5]).miss is Miss.TOO_SHORT
    assert find(rig, adapter_hash=b"another").miss is Miss.OTHER_ADAPTER
    assert find(rig, principal=OTHER).miss is Miss.NEVER_STORED
    rig.snapshots.release([first], ANONYMOUS)
    assert find(rig).miss is Miss.NEVER_STORED
    await stored(rig, 5, lease_s=1.0)
    rig.now += 1
    rig.snapshots.reap()
    assert find(rig).miss is Miss.EVICTED  # its lease was over
    rig = make_rig()
    for length in (4, 5, 6):
        await stored(rig, length)
    assert rig.snapshots.num_evicted == 1
    assert find(rig, PROMPT[:5]).miss is Miss.EVICTED


async def test_a_key_that_is_none_or_wrong() -> None:
    rig = make_rig()
    first, second = rig.open(2)
    await rig.snapshot(first, keys=[key([])])  # there is nothing before its position
    await rig.step((first, PREFILL, 1, 0, -1, PROMPT[:5]), (second, PREFILL, 1, 0, -1, PROMPT[:6]))
    with refuses(Reason.INVALID_REQUEST):
        await rig.snapshot(first, second, keys=[b"short", b""])
    made = await rig.snapshot(first, second, keys=[key(PROMPT[:5]), b""])
    found = find(rig)
    assert found.prefix is not None and found.prefix.snapshot == made[0].id


async def test_another_snapshot_under_a_key_leaves_the_first_one_there() -> None:
    rig = make_rig()
    first = await stored(rig, 5)
    second = await stored(rig, 5)
    found = find(rig)
    assert found.prefix is not None and found.prefix.snapshot == first
    rig.snapshots.release([second], ANONYMOUS)
    assert find(rig).prefix == found.prefix
    rig.snapshots.check_integrity()


async def open_found(rig: Rig, prompt: list[float], count: int = 1) -> tuple[Match, Opened]:
    named = keys(prompt)
    async with rig.states.near_found(named, b"", ANONYMOUS, ReusePolicy.ALWAYS) as found:
        opened = rig.states.open(
            found, named, b"", ANONYMOUS, count=count, lease_s=None, otherwise=lambda: rig.table.open(count)
        )
    assert opened.match is found
    return found, opened


async def test_an_open_begins_with_what_is_found_or_otherwise() -> None:
    rig = make_rig()
    found, opened = await open_found(rig, PROMPT)
    assert (found.prefix, found.miss, found.shared_position) == (None, Miss.NEVER_STORED, 0)
    await stored(rig, 5)
    found, opened = await open_found(rig, [*PROMPT[:8], 0.0], count=2)
    assert found.prefix is not None and (found.prefix.position, found.shared_position) == (5, 8)
    for handle in opened.handles.tolist():
        assert outputs(await rig.step((handle, DECODE, 1, 5, -1, [6.0]))) == [checksum(PROMPT[:6])]


async def test_an_open_that_is_refused_changes_nothing() -> None:
    rig = make_rig()
    await stored(rig, 5)
    for prompt in (PROMPT, [0.0, *PROMPT]):
        with refuses(Reason.NO_FREE_LINES):
            await open_found(rig, prompt, count=9)
        assert (find(rig, prompt).shared_position, rig.table.num_open) == (0, 0)


@pytest.mark.parametrize("adapter", ["7", ""])
async def test_a_state_is_found_under_its_adapter_alone(adapter: str) -> None:
    rig = Rig(snapshot_lines=2, pages=60, adapter_slots=2)
    rig.load("7")
    (handle,) = rig.open(adapter=adapter)
    request = rig.submit(rig.request((handle, PREFILL, 1, 0, -1, PROMPT[:5])))
    if adapter:
        rig.device.finish()
    await request
    rig.scheduler.settle()
    (made,) = await rig.snapshot(handle, keys=[key(PROMPT[:5])])
    hashes = {name: find(rig, adapter_hash=name).prefix for name in (b"", made.adapter_hash or b"another")}
    assert [name for name, prefix in hashes.items() if prefix] == [made.adapter_hash]


async def test_what_is_computed_tells_how_long_the_rest_takes() -> None:
    rig = Rig(snapshot_lines=2, chunk_tokens=1024, slots=4)
    (handle,) = rig.open()
    await rig.step((handle, PREFILL, 1, 0, -1, [1.0] * 1024))
    assert find(rig).compute_s == pytest.approx(10 * 2e-6 / 1024)
