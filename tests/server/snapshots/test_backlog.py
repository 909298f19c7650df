"""What waits to be stored: in its turn, and no longer than it is there; and what stays of it when nobody has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rigs.scheduler_rig import turns
from rigs.small_models import GATED_DELTA_NET
from rigs.state_rig import Array, StateRig

from deltaline_server.batch import StepBatch
from deltaline_server.principal import ANONYMOUS
from deltaline_server.snapshots.backlog import Backlog
from deltaline_server.snapshots.moves import Moves


def ignored(batch: StepBatch, handles: dict[int, int]) -> Callable[[Array], None]:
    return lambda hidden: None


def make_rig(folder: Path) -> tuple[StateRig, Moves]:
    sizes: dict[str, Any] = {"slots": 2, "snapshot_lines": 2, "pages": 0, "references": 1, "host_bytes": 1 << 20}
    rig = StateRig(GATED_DELTA_NET, folder, ignored, state_dir=folder / "states", **sizes)
    assert rig.moves is not None
    return rig, rig.moves


async def captured(rig: StateRig, is_pinned: bool = False) -> bytes:
    """A snapshot of a sequence of no tokens."""
    handles = rig.table.open(1).handles
    [made] = await rig.states.create(rig.table.server_epoch, handles, ANONYMOUS, lease_s=None, is_pinned=is_pinned)
    rig.table.close(rig.table.server_epoch, np.array(handles))
    return made.id


async def stored(moves: Moves) -> None:
    while moves.is_busy:  # noqa: ASYNC110 - it tells nobody, as nobody but tests waits for it
        await asyncio.sleep(0.001)


async def closed(rig: StateRig) -> None:
    await rig.close()


async def test_what_is_forgotten_while_it_waits_is_not_kept() -> None:
    may_go_on, done = asyncio.Event(), list[bytes]()

    async def work(id: bytes) -> None:
        await may_go_on.wait()
        done.append(id)

    backlog, ids = Backlog(work), [b"%d" % number for number in range(1000)]
    for id in ids:
        backlog.add(id)
    await turns(2)
    for id in [b"unknown", *ids[:500], *ids[501:]]:
        backlog.forget(id)
    assert len(backlog) == 1  # beside the first, which is under way
    may_go_on.set()
    await turns()
    assert done == [ids[0], ids[500]] and not backlog.is_busy


async def test_what_is_released_before_its_turn_waits_no_more(tmp_path: Path) -> None:
    """However long a copy takes, what was made and released meanwhile takes no memory."""
    rig, moves = make_rig(tmp_path)
    rig.engine.eager = False  # no copy ends
    for _ in range(50):
        made = await captured(rig)
        await turns(1)
        rig.snapshots.release([made], ANONYMOUS)
    assert moves.is_busy and moves.num_waiting == 0
    rig.engine.run()
    rig.engine.eager = True
    await closed(rig)


async def test_files_of_nobody_make_way_also_pinned_ones(tmp_path: Path) -> None:
    """Whose owner there can be no more is nobody's to release, and no lease of it runs out."""
    rig, moves = make_rig(tmp_path)
    made = await captured(rig, is_pinned=True)
    await stored(moves)
    await closed(rig)
    rig, moves = make_rig(tmp_path)
    await rig.states.find_stored(lambda name: None)
    files = rig.tiers.files
    assert files is not None and files.has(made) and not rig.snapshots.describe(ANONYMOUS)[0]
    files.limit_bytes = files.used_bytes
    newer = await captured(rig)
    await stored(moves)
    assert files.has(newer) and not files.has(made)
    await closed(rig)
