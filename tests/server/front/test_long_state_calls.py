"""Calls about thousands of snapshots leave the event loop to others again and again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import state_service_pb2 as pb
from deltaline.v1.layer_service_pb2_grpc import LayerServiceStub
from deltaline.v1.state_service_pb2_grpc import StateServiceStub
from deltaline_server.app import Server
from deltaline_server.front.states.state_service import AT_ONCE
from deltaline_server.tables.captured.snapshots import SnapshotTable

SEQUENCES, ROUNDS = 256, 4


async def test_no_turn_of_the_loop_is_about_thousands_of_snapshots(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, in_turn = 0, Counter[tuple[str, int]]()
    describe, release, renew = SnapshotTable.describe, SnapshotTable.release, SnapshotTable.renew

    def described(table: SnapshotTable, principal: Any, after: bytes = b"", limit: int | None = None) -> Any:
        page, has_more = describe(table, principal, after, limit)
        in_turn["list", turn] += len(page)
        return page, has_more

    def released(table: SnapshotTable, ids: Any, principal: Any) -> Any:
        in_turn["release", turn] += len(ids)
        return release(table, ids, principal)

    def renewed(table: SnapshotTable, ids: Any, principal: Any, lease_s: float | None) -> Any:
        in_turn["renew", turn] += len(ids)
        return renew(table, ids, principal, lease_s)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async with (
        make_server(max_sequences=SEQUENCES, snapshot_lines=4) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub, state = LayerServiceStub(channel), StateServiceStub(channel)
        opened = await stub.OpenSequences(layers.OpenSequencesRequest(count=SEQUENCES))
        names: dict[str, Any] = {"server_epoch": opened.server_epoch, "sequence": opened.sequence}
        for number in range(ROUNDS):
            await state.CreateSnapshots(pb.CreateSnapshotsRequest(request_id=bytes([number]) * 16, **names))
        for name, call in (("describe", described), ("release", released), ("renew", renewed)):
            monkeypatch.setattr(SnapshotTable, name, call)
        counting = asyncio.create_task(count_turns())
        page = await state.ListSnapshots(pb.ListSnapshotsRequest(limit=1000))
        ids = [one.snapshot_id for one in page.snapshots]
        assert (len(ids), page.has_more, ids == sorted(set(ids))) == (1000, True, True)
        renewal = await state.RenewSnapshots(pb.RenewSnapshotsRequest(request_id=b"r" * 16, snapshot_id=ids))
        assert renewal.state == [pb.SNAPSHOT_STATE_HELD] * 1000
        told = await state.ReleaseSnapshots(pb.ReleaseSnapshotsRequest(request_id=b"r" * 16, snapshot_id=ids))
        assert told.state == [pb.SNAPSHOT_STATE_RELEASED] * 1000
        counting.cancel()
        assert len((await state.ListSnapshots(pb.ListSnapshotsRequest())).snapshots) == SEQUENCES * ROUNDS - 1000
        server.runtime.states.snapshots.check_integrity()
    assert sum(count for (what, _), count in in_turn.items() if what == "list") == SEQUENCES * ROUNDS
    assert max(in_turn.values()) <= AT_ONCE < 1000
