"""Rigs of every family whose snapshots also lie in host memory and files; sequences whose inputs follow from their
position."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rigs.small_models import (
    FALCON,
    GATED_DELTA_NET,
    GLM5_NEXT,
    HYBRID,
    JAMBA,
    KIMI,
    LFM2,
    MAMBA1,
    MAMBA2,
    NEMOTRON,
    ZAMBA,
)
from rigs.state_rig import MAX_DRAFT, PAGE_SIZE, Array, StateRig

from deltaline_server.batch import StepBatch
from deltaline_server.principal import ANONYMOUS
from deltaline_server.step import OutputRows, RowKind, RowWaypoints, StepForm, StepRequest, StepResult
from deltaline_server.tables.captured.snapshot import SnapshotDescription

MODELS: dict[str, tuple[dict[str, Any], list[range] | None]] = {
    "gated_delta_net": (GATED_DELTA_NET, None),
    "mamba1": (MAMBA1, None),
    "mamba2": (MAMBA2, None),
    "short convolutions": (LFM2, None),
    "latents": (KIMI, None),
    "latents among streams": (GLM5_NEXT, None),
    "two states in a layer": (FALCON, None),
    "layers without a state": (NEMOTRON, [range(0, 1), range(1, 4)]),
    "shared blocks": (ZAMBA, None),
    "mamba1 with attention": (JAMBA, None),
    "hybrid": (HYBRID, None),
    "hybrid, two spans": (HYBRID, [range(0, 1), range(1, 2)]),
    "streams": (HYBRID | {"hc_mult": 2}, None),
}
PAGED = [name for name, (config, _) in MODELS.items() if "num_attention_heads" in config]
PREFILL, DECODE, VERIFY = RowKind.PREFILL, RowKind.DECODE, RowKind.VERIFY
HOST_BYTES = 4 << 20
KEY = b"k" * 16


def ignored(batch: StepBatch, handles: dict[int, int]) -> Callable[[Array], None]:
    return lambda hidden: None


def make_rig(folder: Path, name: str = "hybrid", files: bool = False, **changes: Any) -> StateRig:
    config, spans = MODELS[name]
    sizes: dict[str, Any] = {"slots": 6, "snapshot_lines": 2, "pages": 60, "references": 1, "host_bytes": HOST_BYTES}
    state_dir = folder / "states" if files else None
    return StateRig(config, folder, ignored, spans=spans, state_dir=state_dir, **(sizes | changes))


class Sequence:
    """A sequence with its step numbers, whose inputs follow from its position alone."""

    def __init__(self, rig: StateRig, handle: int, position: int = 0) -> None:
        self.rig, self.handle, self.position, self.num_steps = rig, handle, position, 0

    async def step(
        self, kind: RowKind, count: int, accepted: int = -1, waypoints: RowWaypoints | None = None
    ) -> list[Array]:
        """The outputs of a step on every span, each with inputs of its own."""
        self.num_steps += 1
        self.position += max(accepted, 0)
        outputs = []
        for span, ends in enumerate(self.rig.model.ends):
            draw = np.random.default_rng([self.position, span])
            hidden = draw.standard_normal((count, ends.input_width)).astype(np.float32)
            form = StepForm(
                self.rig.table.server_epoch,
                span,
                np.array([self.handle], dtype=np.uint64),
                np.array([kind], dtype=np.uint8),
                np.array([accepted], dtype=np.int32),
                np.array([0, count], dtype=np.int64),
                OutputRows.ALL,
                0,
                ends,
                {} if waypoints is None else {0: waypoints},
            )
            request = StepRequest(form, np.array([self.num_steps]), np.array([self.position]), hidden)
            done: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
            self.rig.scheduler.submit(request, done.set_result)
            result = await done
            assert not result.refusals, result.refusals
            outputs.append(np.array(result.hidden, copy=True))
        self.position += 0 if kind is VERIFY else count
        return outputs

    async def verified(self, accepted: int) -> None:
        """A verify whose commit rides on no step."""
        await self.step(VERIFY, MAX_DRAFT)
        table, handles = self.rig.table, np.array([self.handle], dtype=np.uint64)
        counts, steps = np.array([accepted], dtype=np.int32), np.array([self.num_steps])
        for span in range(len(self.rig.model.spans)):
            assert not table.commit(table.server_epoch, span, handles, steps, counts)[1]
        self.position += accepted

    async def goes_on(self) -> list[Array]:
        """Outputs of steps of every kind."""
        outputs = await self.step(DECODE, 1)
        outputs += await self.step(PREFILL, PAGE_SIZE + 3)
        outputs += await self.step(VERIFY, 3)
        return outputs + await self.step(DECODE, 1, accepted=2)


def opened(rig: StateRig) -> Sequence:
    return Sequence(rig, int(rig.table.open(1, lease_s=1e3).handles[0]))


async def prefilled(rig: StateRig, count: int = 37) -> Sequence:
    sequence = opened(rig)
    await sequence.step(PREFILL, count)
    return sequence


async def captured(sequence: Sequence, **changes: Any) -> SnapshotDescription:
    options: dict[str, Any] = {"lease_s": 1e3, "is_pinned": False} | changes
    handles = np.array([sequence.handle], dtype=np.uint64)
    [made] = await sequence.rig.states.create(sequence.rig.table.server_epoch, handles, ANONYMOUS, **options)
    sequence.rig.snapshots.check_integrity()
    return made


async def restored(rig: StateRig, one: SnapshotDescription, count: int = 1) -> list[Sequence]:
    async with rig.states.near([one.id] * count, ANONYMOUS):
        handles = rig.states.restore([one.id] * count, ANONYMOUS, lease_s=1e3).handles
    rig.snapshots.check_integrity()
    return [Sequence(rig, handle, one.position) for handle in handles.tolist()]


async def settled(rig: StateRig) -> None:
    """All that waits was stored."""
    assert rig.moves is not None
    while rig.moves.is_busy:  # noqa: ASYNC110 - it tells nobody, as nobody but tests waits for it
        await asyncio.sleep(0.001)


async def pushed_out(rig: StateRig) -> None:
    """Pinned snapshots take all lines, so that what was there gives way, and end."""
    others = [await prefilled(rig, 3) for _ in range(rig.lines.snapshot_lines)]
    made = [await captured(other, is_pinned=True) for other in others]
    rig.table.close(rig.table.server_epoch, np.array([other.handle for other in others], dtype=np.uint64))
    await settled(rig)
    rig.snapshots.release([one.id for one in made], ANONYMOUS)


def described(rig: StateRig, one: SnapshotDescription) -> SnapshotDescription:
    [found] = [each for each in rig.snapshots.describe(ANONYMOUS)[0] if each.id == one.id]
    return found


async def leave_host(rig: StateRig, id: bytes) -> None:
    """Host memory evicts a snapshot."""
    assert rig.tiers.host is not None
    rig.tiers.host.release(id)
    rig.tiers.host.on_evicted(id)
