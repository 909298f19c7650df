"""How long it takes to bring a state back, as a server estimates it from those that came back before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs.scheduler_rig import turns
from rigs.small_models import GATED_DELTA_NET
from rigs.state_rig import Array, StateRig

from deltaline_server.batch import StepBatch
from deltaline_server.principal import ANONYMOUS
from deltaline_server.snapshots import moves
from deltaline_server.tables.captured.capture import Needs
from deltaline_server.tables.captured.snapshot import SnapshotState
from deltaline_server.tables.prefixes.cost import Tier


def ignored(batch: StepBatch, handles: dict[int, int]) -> Callable[[Array], None]:
    return lambda hidden: None


async def brought_back(folder: Path) -> tuple[Any, Any]:
    """Bring a state of some kilobytes back from host memory; what the server thinks of that before and after."""
    sizes: dict[str, Any] = {"slots": 2, "snapshot_lines": 2, "pages": 0, "references": 1, "host_bytes": 1 << 20}
    rig = StateRig(GATED_DELTA_NET, folder, ignored, **sizes)
    assert rig.moves is not None
    handles = rig.table.open(1).handles
    [made] = await rig.states.create(rig.table.server_epoch, handles, ANONYMOUS, lease_s=None, is_pinned=False)
    rig.table.close(rig.table.server_epoch, np.array(handles))
    while rig.moves.is_busy:
        await turns(1)
    rig.snapshots.device.make_room(Needs(), num_snapshots=rig.snapshots.device.limit)
    held = rig.snapshots.get(made.id)
    assert held is not None and held.is_far(ANONYMOUS)
    before = dict(rig.moves.ways)
    async with rig.states.near([made.id], ANONYMOUS):
        assert rig.moves.num_brought[Tier.HOST] == 1
    assert rig.snapshots.renew([made.id], ANONYMOUS, lease_s=None) == [SnapshotState.HELD]
    await rig.close()
    return before, dict(rig.moves.ways)


async def test_a_small_state_says_nothing_of_a_tier_s_speed(tmp_path: Path) -> None:
    """All that it takes is the time that any takes: a few of them would let large ones seem to take hours."""
    before, after = await brought_back(tmp_path)
    assert after == before


async def test_a_large_state_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MEASURED_BYTES", 1)
    before, after = await brought_back(tmp_path)
    assert after[Tier.FILE] == before[Tier.FILE]
    assert after[Tier.HOST].latency_s == before[Tier.HOST].latency_s
    assert 0 < after[Tier.HOST].bytes_per_s < before[Tier.HOST].bytes_per_s
