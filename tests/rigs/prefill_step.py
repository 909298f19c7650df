"""The first step of a sequence, as a message: what is sent again and again for its kept reply."""

from __future__ import annotations

from deltaline.v1 import layer_service_pb2 as pb
from deltaline.v1 import tensor_pb2


def prefill_step(opened: pb.OpenSequencesResponse, hidden: tensor_pb2.Tensor) -> pb.StepRequest:
    """A prefill of the one sequence that was opened, with hidden states `[T, width]`."""
    return pb.StepRequest(
        server_epoch=opened.server_epoch,
        sequence=opened.sequence,
        kind=[pb.ROW_KIND_PREFILL],
        step=[1],
        position=[0],
        accepted=[-1],
        query_start_loc=[0, hidden.shape[0]],
        hidden=hidden,
    )
