"""Whose snapshots come back first, of those that wait for it."""

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
from deltaline_server.principal import Principal
from deltaline_server.tables.captured.capture import Needs

MANY, FEW = Principal(1, "many"), Principal(2, "few")


def ignored(batch: StepBatch, handles: dict[int, int]) -> Callable[[Array], None]:
    return lambda hidden: None


async def test_nobody_waits_for_all_that_another_brings_back(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"slots": 4, "snapshot_lines": 4, "pages": 0, "references": 1, "host_bytes": 1 << 20}
    rig = StateRig(GATED_DELTA_NET, tmp_path, ignored, **sizes)
    assert rig.moves is not None
    ids = dict[bytes, Principal]()
    for principal in (MANY, MANY, MANY, FEW):
        handles = rig.table.open(1, principal=principal).handles
        [made] = await rig.states.create(rig.table.server_epoch, handles, principal, lease_s=None, is_pinned=False)
        rig.table.close(rig.table.server_epoch, np.array(handles), principal)
        ids[made.id] = principal
    while rig.moves.is_busy:  # noqa: ASYNC110 - it tells nobody, as nobody but tests waits for it
        await asyncio.sleep(0.001)
    rig.snapshots.device.make_room(Needs(), num_snapshots=rig.snapshots.device.limit)
    rig.engine.eager = False
    back = [asyncio.create_task(rig.moves.bring_back(id)) for id in ids]
    for _ in range(2):
        await turns()
        rig.engine.run()
    await turns()
    assert [task.done() for task in back] == [True, False, False, True]
    rig.engine.eager = True
    rig.engine.run()
    await asyncio.gather(*back)
    await rig.close()
