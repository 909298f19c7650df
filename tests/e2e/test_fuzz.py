"""Bodies that nobody meant: whatever bytes come, the process lives, no line is lost, and a witness keeps its bits.

Random bodies and mutated valid requests, for every method.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2
from rigs.target import ADAPTER, ADMIN, HIDDEN, LAYER, LEAK, Target, step_request

from deltaline.v1 import adapter_service_pb2, admin_service_pb2
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_client import Row

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODIES_AT_ONCE = 50
NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


def valid_requests(target: Target, handle: int) -> dict[str, Any]:
    """One valid request of each method."""
    step = step_request(target, [handle])
    return {
        LAYER + "OpenSequences": pb.OpenSequencesRequest(count=1, lease_ms=1000),
        LAYER + "CloseSequences": pb.CloseSequencesRequest(server_epoch=target.epoch, sequence=[handle]),
        LAYER + "DescribeSequences": pb.DescribeSequencesRequest(server_epoch=target.epoch, sequence=[handle]),
        LAYER + "RenewLeases": pb.RenewLeasesRequest(server_epoch=target.epoch, sequence=[handle], lease_ms=1000),
        LAYER + "Step": step,
        LAYER + "CommitSequences": pb.CommitSequencesRequest(
            server_epoch=target.epoch, sequence=[handle], step=[1], accepted=[0]
        ),
        LAYER + "StepStream": pb.StepStreamRequest(correlation_id=7, step=step),
        ADMIN + "GetServerInfo": admin_service_pb2.GetServerInfoRequest(),
        ADMIN + "GetLoad": admin_service_pb2.GetLoadRequest(),
        ADMIN + "CreateSharedMemory": admin_service_pb2.CreateSharedMemoryRequest(size_bytes=100, lease_ms=1000),
        ADMIN + "ReleaseSharedMemory": admin_service_pb2.ReleaseSharedMemoryRequest(region=1),
        ADAPTER + "LoadAdapter": adapter_service_pb2.LoadAdapterRequest(
            name="a", upload=adapter_service_pb2.AdapterUpload(config=b"{}", tensors_bytes=9), chunk=b"x" * 9
        ),
        ADAPTER + "UnloadAdapter": adapter_service_pb2.UnloadAdapterRequest(name="a", drain=True),
        ADAPTER + "ListAdapters": adapter_service_pb2.ListAdaptersRequest(),
        ADMIN + "Drain": admin_service_pb2.DrainRequest(timeout_ms=600_000),
    }


def mutate(body: bytes, rng: np.random.Generator) -> bytes:
    """Flip, cut, insert or repeat some bytes, mostly near the front where the small fields are."""
    data = bytearray(body or b"\x00")
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, min(len(data), 120) if rng.random() < 0.8 else len(data)))
        match int(rng.integers(0, 5)):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at] = int(rng.integers(0, 256))
            case 2:
                del data[at : at + int(rng.integers(1, 9))]
            case 3:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                data[at:at] = data[at : at + int(rng.integers(1, 40))]
        data = data or bytearray(1)
    return bytes(data)


def row_statuses(method: str, reply: bytes) -> list[Any]:
    """Statuses of refused rows in a reply; of a stream, those of its last answer."""
    match method.removeprefix(LAYER):
        case "Step":
            return [row.status for row in pb.StepResponse.FromString(reply).row_status]
        case "CommitSequences":
            return [row.status for row in pb.CommitSequencesResponse.FromString(reply).row_status]
        case "StepStream":
            answer = pb.StepStreamResponse.FromString(reply)
            return [answer.status] if answer.HasField("status") else [row.status for row in answer.step.row_status]
    return []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_bodies", [200, pytest.param(2000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("mutated", [pytest.param(False, id="random"), pytest.param(True, id="mutated")])
@pytest.mark.parametrize(
    "method",
    [
        *(LAYER + m.name for m in pb.DESCRIPTOR.services_by_name["LayerService"].methods),
        *(ADAPTER + m.name for m in adapter_service_pb2.DESCRIPTOR.services_by_name["AdapterService"].methods),
        *(ADMIN + m.name for m in admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods),
    ],
)
async def test_bodies_that_nobody_meant(target: Target, method: str, mutated: bool, num_bodies: int) -> None:
    rng = np.random.default_rng(sum(method.encode()) + mutated)
    num_refused_rows = 0
    victims = await target.client.open_many(num_bodies // BODIES_AT_ONCE)
    if method.endswith("CommitSequences"):
        await target.client.step([Row.verify(victim, np.ones((3, HIDDEN), dtype=np.float32)) for victim in victims])
    for victim in victims:  # each meets its bodies as it is in a valid request
        valid = valid_requests(target, victim.handle)[method].SerializeToString()
        bodies = [
            mutate(valid, rng) if mutated else rng.bytes(int(rng.choice([0, 1, 2, 5, 20, 100, 3000, 1 << 16])))
            for _ in range(BODIES_AT_ONCE)
        ]
        for code, text, reply, status in await asyncio.gather(*(target.send(method, body) for body in bodies)):
            assert code not in NEVER, (code, text)
            assert not LEAK.search(text), text
            if code is not grpc.StatusCode.OK:
                assert status is not None and status.details, (code, text)
            for row_status in row_statuses(method, reply):
                num_refused_rows += 1
                assert row_status.code not in (code_pb2.UNKNOWN, code_pb2.INTERNAL), row_status
                assert row_status.details and not LEAK.search(row_status.message), row_status
        target.close_strays(victims)
    target.close_strays()
    target.server.runtime.table.is_draining = False  # another method's turn
    assert not mutated or num_refused_rows > 0 or not method.endswith(("Step", "CommitSequences", "StepStream"))
    await target.check_unharmed()
