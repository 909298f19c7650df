"""AdminService: what its fields mean to the parts behind it, and theirs in its answers."""

from __future__ import annotations

import asyncio
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.principals import as_anonymous
from rigs.scheduler_rig import DECODE, PREFILL, Rig, refuses, turns

from deltaline.v1 import admin_service_pb2 as pb
from deltaline_server.errors import Reason, RequestError
from deltaline_server.front.admin_service import MAX_DRAIN_MS, AdminService
from deltaline_server.memory.regions import Regions

CONTEXT: Any = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1")


class Drains:
    """Stands in for a drain. begun: what was asked for, in seconds, and the targets; of these one is refused."""

    def __init__(self) -> None:
        self.begun: list[tuple[float | None, str]] = []

    async def check(self, target: str) -> None:
        if target == "bad:1":
            raise RequestError(Reason.MOVE_TARGET_REFUSED, "target: expected another")

    def begin(self, timeout_s: float | None, target: str) -> None:
        self.begun.append((timeout_s, target))


class Administered:
    """The service before a rig's table and scheduler."""

    def __init__(self, rig: Rig) -> None:
        self.drain = Drains()
        drain: Any = self.drain
        self.regions = Regions(
            limit_bytes=16 * mmap.PAGESIZE, default_lease_s=10.0, max_lease_s=60.0, clock=lambda: rig.now
        )
        info = pb.GetServerInfoResponse(version="1")
        self.service = AdminService(
            info=info, table=rig.table, scheduler=rig.scheduler, regions=self.regions, drain=drain
        )


@pytest.mark.parametrize(("asked_ms", "given_ms"), [(1, 1), (1500, 1500), (60_000, 60_000), (0, 10_000)])
async def test_a_region_s_lease_is_in_milliseconds(asked_ms: int, given_ms: int) -> None:
    as_anonymous()
    made = Administered(Rig())
    request = pb.CreateSharedMemoryRequest(size_bytes=10, lease_ms=asked_ms)
    answer = pb.CreateSharedMemoryResponse.FromString(await made.service.create_shared_memory(request, CONTEXT))
    assert (answer.lease_ms, answer.size_bytes) == (given_ms, mmap.PAGESIZE) and answer.nonce
    assert (
        await made.service.release_shared_memory(pb.ReleaseSharedMemoryRequest(region=answer.region), CONTEXT)
    ) == b""
    await made.regions.close()


@pytest.mark.parametrize(("timeout_ms", "timeout_s"), [(0, None), (1, 0.001), (2500, 2.5), (MAX_DRAIN_MS, 24 * 3600.0)])
async def test_a_drain_s_time_is_in_milliseconds(timeout_ms: int, timeout_s: float | None) -> None:
    rig = Rig()
    rig.open(3)
    made = Administered(rig)
    answer = await made.service.drain(pb.DrainRequest(timeout_ms=timeout_ms), CONTEXT)
    assert pb.DrainResponse.FromString(answer).sequences_open == 3 and made.drain.begun == [(timeout_s, "")]
    with refuses(Reason.INVALID_REQUEST) as refused:
        await made.service.drain(pb.DrainRequest(timeout_ms=MAX_DRAIN_MS + 1), CONTEXT)
    assert refused.value.refusal.field == "timeout_ms" and len(made.drain.begun) == 1


async def test_a_drain_begins_with_a_target_that_is_accepted_and_with_no_other() -> None:
    made = Administered(Rig())
    with refuses(Reason.MOVE_TARGET_REFUSED):
        await made.service.drain(pb.DrainRequest(target="bad:1"), CONTEXT)
    assert made.drain.begun == []
    await made.service.drain(pb.DrainRequest(timeout_ms=5000, target="good:1"), CONTEXT)
    assert made.drain.begun == [(5.0, "good:1")]


async def test_load_is_every_number_by_its_name() -> None:
    rig = Rig(slots=8, eager=False, pages=6, queue_rows=32, queue_bytes=4096, reply_bytes=8192)
    a, b, _ = rig.open(3)
    made = Administered(rig)
    done = rig.submit(rig.request((a, PREFILL, 1, 0, -1, [1.0] * 3), (b, DECODE, 1, 0, -1, [1.0])))
    await asyncio.sleep(0)
    load = pb.GetLoadResponse.FromString(await made.service.get_load(pb.GetLoadRequest(), CONTEXT))
    assert load == pb.GetLoadResponse(
        sequences_open=3,
        lines_used=3,
        lines_total=8,
        queued_rows=2,
        queued_rows_limit=32,
        queued_bytes=4 * 8,
        queued_bytes_limit=4096,
        reply_bytes=4 * 16,
        reply_bytes_limit=8192,
        kv_pages_used=2,
        kv_pages_total=6,
    )
    rig.table.is_draining = True
    rig.engine.release()
    await done
    await turns()
    load = pb.GetLoadResponse.FromString(await made.service.get_load(pb.GetLoadRequest(), CONTEXT))
    assert (load.draining, load.queued_rows, load.queued_bytes) == (True, 0, 0)
