"""Who needs more lines than there could ever be is not told to come again; who has to wait for them is."""

from __future__ import annotations

from functools import partial

import pytest
from rigs.scheduler_rig import PREFILL, Rig, refuses

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
    for one in rig.states.describe(principal)[0]:
        rig.states.release([one.id], principal)
    if may_fit:
        await rig.snapshot(*handles[:asked], is_pinned=True, principal=principal)
