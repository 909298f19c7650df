"""Which roles a method asks for: one table, and what is not in it nobody may call."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """What a principal may do, as the principals' file names it."""

    STEP = "step"
    """Hold sequences and their snapshots, and step them."""
    ADAPTER = "adapter"
    """Load and unload adapters."""
    ADMIN = "admin"
    """Drain the server, and load adapters for all."""
    PEER = "peer"
    """Be a server that state is moved to or from."""


EVERY_ROLE = frozenset(Role)
NOBODY: frozenset[Role] = frozenset()
# Calls without credentials as well.
OPEN = None
_STEP, _ADMIN = frozenset({Role.STEP}), frozenset({Role.ADMIN})
_ADAPTER = frozenset({Role.ADAPTER, Role.ADMIN})

ROLES: Mapping[str, frozenset[Role] | None] = {
    "/deltaline.v1.LayerService/OpenSequences": _STEP,
    "/deltaline.v1.LayerService/CloseSequences": _STEP,
    "/deltaline.v1.LayerService/DescribeSequences": _STEP,
    "/deltaline.v1.LayerService/RenewLeases": _STEP,
    "/deltaline.v1.LayerService/Step": _STEP,
    "/deltaline.v1.LayerService/CommitSequences": _STEP,
    "/deltaline.v1.LayerService/StepStream": _STEP,
    "/deltaline.v1.StateService/ForkSequences": _STEP,
    "/deltaline.v1.StateService/CreateSnapshots": _STEP,
    "/deltaline.v1.StateService/RestoreSequences": _STEP,
    "/deltaline.v1.StateService/FindSnapshots": _STEP,
    "/deltaline.v1.StateService/ListSnapshots": _STEP,
    "/deltaline.v1.StateService/RenewSnapshots": _STEP,
    "/deltaline.v1.StateService/ReleaseSnapshots": _STEP,
    "/deltaline.v1.StateService/ExportState": _STEP,
    "/deltaline.v1.StateService/ImportState": _STEP | {Role.PEER},
    "/deltaline.v1.StateService/MoveSequences": _STEP,
    "/deltaline.v1.AdapterService/LoadAdapter": _ADAPTER,
    "/deltaline.v1.AdapterService/UnloadAdapter": _ADAPTER,
    "/deltaline.v1.AdapterService/ListAdapters": EVERY_ROLE,
    "/deltaline.v1.AdminService/GetServerInfo": EVERY_ROLE,
    "/deltaline.v1.AdminService/GetLoad": EVERY_ROLE,
    "/deltaline.v1.AdminService/CreateSharedMemory": _STEP,
    "/deltaline.v1.AdminService/ReleaseSharedMemory": _STEP,
    "/deltaline.v1.AdminService/Drain": _ADMIN,
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": EVERY_ROLE,
}
"""The roles of which a principal needs one, by the method's path."""
