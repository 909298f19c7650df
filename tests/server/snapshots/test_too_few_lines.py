"""Who needs more lines than there could ever be is not told to come again; who has to wait for them is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, VERIFY, Rig, checksum, outputs, refuses

from deltaline_server.errors import Reason
from deltaline_server.principal import Principal


@pytest.mark.parametrize("snapshot_lines", [0, 1, 2])
async def test_more_lines_than_the_server_has(snapshot_lines: int) -> None:
    rig = Rig(snapshot_lines=snapshot_lines, pages=60)
    handles = rig.open(3)
    await rig.step(*((handle, PREFILL, 1, 0, -1, [1.0, 2.0]) for handle in handles))
    most = handles[: snapshot_lines + 1]
    for ask in (partial(rig.snapshot, *most), partial(rig.fork, *most)):
        with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
            await ask()
        assert caught.value.refusal.retry_after_s is None and "--snapshot-lines" in str(caught.value)
    if snapshot_lines:
        await rig.snapshot(*handles[:snapshot_lines], is_pinned=True)
        with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
            await rig.snapshot(handles[-1])
        assert caught.value.refusal.retry_after_s == 1.0


@pytest.mark.parametrize(("asked", "may_fit"), [(1, True), (2, True), (3, False), (4, False)])
async def test_more_lines_than_are_ever_left_to_a_principal(asked: int, may_fit: bool) -> None:
    rig, principal = Rig(slots=10, snapshot_lines=4), Principal(1, "greedy")
    handles = [int(one) for one in rig.table.open(6, principal=principal).handles]
    if may_fit:
        await rig.snapshot(*handles[4:], is_pinned=True, principal=principal)
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await rig.snapshot(*handles[:asked], is_pinned=True, principal=principal)
    assert (caught.value.refusal.retry_after_s is not None) == may_fit
    for one in rig.snapshots.describe(principal)[0]:
        rig.snapshots.release([one.id], principal)
    if may_fit:
        await rig.snapshot(*handles[:asked], is_pinned=True, principal=principal)


async def test_a_sequence_that_waits_on_two_lines_gives_back_one() -> None:
    """It writes one line: who needs two has to wait, and nothing of the call is left behind."""
    rig = Rig(slots=4, spans=2, snapshot_lines=2, pages=60, page_size=4, paged_spans=(0, 1))
    waiting, *others = rig.open(3)
    for handle, token in zip((waiting, *others), (1.0, 2.0, 3.0), strict=True):
        for span in (0, 1):
            await rig.step((handle, PREFILL, 1, 0, -1, [token] * 8), span=span)
    await rig.snapshot(waiting)
    await rig.step((waiting, VERIFY, 2, 8, -1, [7.0, 8.0]), span=0)
    handles, steps = np.array([waiting], dtype=np.uint64), np.array([2])
    rig.table.commit(rig.table.server_epoch, 0, handles, steps, np.array([0], dtype=np.int32))
    await rig.snapshot(waiting)
    with refuses(Reason.NO_SNAPSHOT_LINES):
        await rig.snapshot(*others)
    rig.snapshots.check_integrity()
    await rig.snapshot(others[0])
    for handle, token in zip(others, (2.0, 3.0), strict=True):
        result = await rig.step((handle, DECODE, 2, 8, -1, [9.0]), span=0)
        assert outputs(result) == [checksum([token] * 8 + [9.0])]


@pytest.mark.parametrize("way", ["create", "restore"])
async def test_a_principal_leaves_others_lines_that_it_keeps_by_a_step_on_one_span(way: str) -> None:
    rig = Rig(slots=16, spans=2, snapshot_lines=4)
    greedy, other = Principal(1, "greedy"), Principal(2, "other")

    async def prefilled(principal: Principal) -> int:
        (handle,) = rig.table.open(1, principal=principal).handles.tolist()
        for span in (0, 1):
            await rig.step((handle, PREFILL, 1, 0, -1, [1.0]), span=span, principal=principal)
        return int(handle)

    async def keep() -> None:
        """A line that no snapshot has any more, and that is not given back."""
        handle, step = await prefilled(greedy), 2
        [made] = await rig.snapshot(handle, principal=greedy)
        if way == "restore":
            for span in (0, 1):
                await rig.step((handle, DECODE, 2, 1, -1, [2.0]), span=span, principal=greedy)
            (handle,), step = rig.restore(made.id, principal=greedy), 1
        await rig.step((handle, DECODE, step, 1, -1, [2.0]), principal=greedy)
        rig.snapshots.release([made.id], greedy)

    await keep()
    await keep()
    with refuses(Reason.NO_SNAPSHOT_LINES) as caught:
        await keep()
    assert caught.value.refusal.retry_after_s is not None
    await rig.snapshot(await prefilled(other), principal=other)
    rig.snapshots.check_integrity()
