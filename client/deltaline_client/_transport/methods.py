"""The methods of the service: their full names, and the types of their requests and responses."""

from __future__ import annotations

from deltaline.v1 import adapter_service_pb2 as adapters
from deltaline.v1 import admin_service_pb2 as admin
from deltaline.v1 import layer_service_pb2 as layers
from deltaline.v1 import state_service_pb2 as states
from deltaline_client._transport.flow import Method

_LAYERS = "/deltaline.v1.LayerService/"
_ADMIN = "/deltaline.v1.AdminService/"
_ADAPTERS = "/deltaline.v1.AdapterService/"
_STATES = "/deltaline.v1.StateService/"

OPEN = Method(_LAYERS + "OpenSequences", layers.OpenSequencesRequest, layers.OpenSequencesResponse)
CLOSE = Method(_LAYERS + "CloseSequences", layers.CloseSequencesRequest, layers.CloseSequencesResponse)
DESCRIBE = Method(_LAYERS + "DescribeSequences", layers.DescribeSequencesRequest, layers.DescribeSequencesResponse)
RENEW = Method(_LAYERS + "RenewLeases", layers.RenewLeasesRequest, layers.RenewLeasesResponse)
COMMIT = Method(_LAYERS + "CommitSequences", layers.CommitSequencesRequest, layers.CommitSequencesResponse)
INFO = Method(_ADMIN + "GetServerInfo", admin.GetServerInfoRequest, admin.GetServerInfoResponse)
LOAD = Method(_ADMIN + "GetLoad", admin.GetLoadRequest, admin.GetLoadResponse)
DRAIN = Method(_ADMIN + "Drain", admin.DrainRequest, admin.DrainResponse)
CREATE_MEMORY = Method(_ADMIN + "CreateSharedMemory", admin.CreateSharedMemoryRequest, admin.CreateSharedMemoryResponse)
RELEASE_MEMORY = Method(
    _ADMIN + "ReleaseSharedMemory", admin.ReleaseSharedMemoryRequest, admin.ReleaseSharedMemoryResponse
)

LOAD_ADAPTER = Method(
    _ADAPTERS + "LoadAdapter", adapters.LoadAdapterRequest, adapters.LoadAdapterResponse, takes_stream=True
)
UNLOAD_ADAPTER = Method(_ADAPTERS + "UnloadAdapter", adapters.UnloadAdapterRequest, adapters.UnloadAdapterResponse)
LIST_ADAPTERS = Method(_ADAPTERS + "ListAdapters", adapters.ListAdaptersRequest, adapters.ListAdaptersResponse)

FORK = Method(_STATES + "ForkSequences", states.ForkSequencesRequest, states.ForkSequencesResponse)
CREATE_SNAPSHOTS = Method(_STATES + "CreateSnapshots", states.CreateSnapshotsRequest, states.CreateSnapshotsResponse)
RESTORE = Method(_STATES + "RestoreSequences", states.RestoreSequencesRequest, states.RestoreSequencesResponse)
FIND_SNAPSHOTS = Method(_STATES + "FindSnapshots", states.FindSnapshotsRequest, states.FindSnapshotsResponse)
LIST_SNAPSHOTS = Method(_STATES + "ListSnapshots", states.ListSnapshotsRequest, states.ListSnapshotsResponse)
RENEW_SNAPSHOTS = Method(_STATES + "RenewSnapshots", states.RenewSnapshotsRequest, states.RenewSnapshotsResponse)
RELEASE_SNAPSHOTS = Method(
    _STATES + "ReleaseSnapshots", states.ReleaseSnapshotsRequest, states.ReleaseSnapshotsResponse
)

EXPORT_STATE = Method(_STATES + "ExportState", states.ExportStateRequest, states.ExportStateResponse, gives_stream=True)
IMPORT_STATE = Method(_STATES + "ImportState", states.ImportStateRequest, states.ImportStateResponse, takes_stream=True)
MOVE = Method(_STATES + "MoveSequences", states.MoveSequencesRequest, states.MoveSequencesResponse)

STEP_STREAM = _LAYERS + "StepStream"

METHODS = (
    *(OPEN, CLOSE, DESCRIBE, RENEW, COMMIT),
    *(INFO, LOAD, DRAIN, CREATE_MEMORY, RELEASE_MEMORY),
    *(LOAD_ADAPTER, UNLOAD_ADAPTER, LIST_ADAPTERS),
    *(FORK, CREATE_SNAPSHOTS, RESTORE, FIND_SNAPSHOTS, LIST_SNAPSHOTS, RENEW_SNAPSHOTS, RELEASE_SNAPSHOTS),
    *(EXPORT_STATE, IMPORT_STATE, MOVE),
)
"""All but the stream."""
