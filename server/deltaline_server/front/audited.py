"""Which calls the audit is told of, and what of them: never tensors, tokens or handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deltaline.v1 import adapter_service_pb2, admin_service_pb2, layer_service_pb2, state_service_pb2

_LAYER, _STATE, _ADAPTER, _ADMIN = (
    f"/{module.DESCRIPTOR.services_by_name[name].full_name}"
    for module, name in (
        (layer_service_pb2, "LayerService"),
        (state_service_pb2, "StateService"),
        (adapter_service_pb2, "AdapterService"),
        (admin_service_pb2, "AdminService"),
    )
)


class Audited(NamedTuple):
    """What a call did, in a word, and its values: of its one message, or of the reply to a stream."""

    what: str
    values: Callable[[Any], Mapping[str, object]]


def _loaded(reply: bytes) -> dict[str, object]:
    adapter = adapter_service_pb2.LoadAdapterResponse.FromString(reply).adapter
    return {"adapter": adapter.name, "content": adapter.content_hash.hex()[:16]}


def _imported(reply: bytes) -> dict[str, object]:
    came = state_service_pb2.ImportStateResponse.FromString(reply)
    if came.HasField("sequence"):
        return {"sequences": 1, "adapter": came.sequence.adapter}
    return {"position": came.snapshot.position, "pinned": came.snapshot.pinned}


AUDITED = {
    f"{_LAYER}/OpenSequences": Audited("opened", lambda asked: {"count": asked.count, "adapter": asked.adapter}),
    f"{_STATE}/ForkSequences": Audited(
        "forked", lambda asked: {"sequences": len(asked.sequence), "count": asked.count}
    ),
    f"{_STATE}/CreateSnapshots": Audited(
        "snapshots made", lambda asked: {"sequences": len(asked.sequence), "pinned": asked.pinned}
    ),
    f"{_STATE}/RestoreSequences": Audited("restored", lambda asked: {"snapshots": len(asked.snapshot_id)}),
    f"{_STATE}/ReleaseSnapshots": Audited("snapshots released", lambda asked: {"snapshots": len(asked.snapshot_id)}),
    f"{_STATE}/ExportState": Audited("exported", lambda asked: {"sequences" if asked.sequence else "snapshots": 1}),
    f"{_STATE}/ImportState": Audited("imported", _imported),
    f"{_STATE}/MoveSequences": Audited(
        "moved", lambda asked: {"sequences": len(asked.sequence), "target": asked.target}
    ),
    f"{_ADAPTER}/LoadAdapter": Audited("loaded", _loaded),
    f"{_ADAPTER}/UnloadAdapter": Audited("unloaded", lambda asked: {"adapter": asked.name}),
    f"{_ADMIN}/CreateSharedMemory": Audited("shared memory", lambda asked: {"size_bytes": asked.size_bytes}),
    f"{_ADMIN}/Drain": Audited("drained", lambda asked: {"timeout_ms": asked.timeout_ms, "target": asked.target}),
}
