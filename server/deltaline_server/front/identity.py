"""Who this server is to its clients, and whether a call means it: by the name in the call's metadata."""

from __future__ import annotations

from dataclasses import dataclass, replace

from google.protobuf.descriptor import MethodDescriptor

from deltaline.v1 import adapter_service_pb2, admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline_server.errors import RequestError
from deltaline_server.front.requests import read_epoch
from deltaline_server.front.trust.peer import CallContext
from deltaline_server.step import StepRequest
from deltaline_server.tables.sequence import ANOTHER_SERVER, GONE, SequenceState

SERVER = "deltaline-server"
"""The metadata that says which server a call means."""


def _names_epoch(method: MethodDescriptor) -> bool:
    """Whether requests of a method say which process they mean, so that each sequence is answered by itself."""
    parts = [field.message_type for field in method.input_type.fields if field.message_type is not None]
    return any("server_epoch" in message.fields_by_name for message in (method.input_type, *parts))


_BY_NAME_ALONE = frozenset(
    f"/{service.full_name}/{method.name}"
    for module in (layer_service_pb2, state_service_pb2, adapter_service_pb2, admin_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not _names_epoch(method)
)


@dataclass
class Identity:
    """name: the address at which clients go on, "" for none. server_epoch: of this process, never 0 once it serves.

    An epoch goes before a name: what this process holds it answers for, however it was reached.
    """

    name: str = ""
    server_epoch: int = 0

    def means_another(self, context: CallContext) -> bool:
        """Whether a call has the name of another server."""
        names = [value for key, value in context.invocation_metadata() or () if key == SERVER]
        return bool(names) and names != [self.name]

    def check(self, method: str, context: CallContext) -> None:
        """Raise RequestError STATE_ELSEWHERE for a call that means another server and has no epoch to judge it by."""
        if method in _BY_NAME_ALONE:
            self.check_name(context)

    def check_name(self, context: CallContext) -> None:
        """The same of any method."""
        if self.means_another(context):
            raise RequestError(*GONE[SequenceState.ELSEWHERE])

    def epoch(self, server_epoch: int, context: CallContext) -> int:
        """The epoch of a call about sequences, as the tables take it. Raises RequestError for none."""
        is_other = read_epoch(server_epoch) != self.server_epoch and self.means_another(context)
        return ANOTHER_SERVER if is_other else server_epoch

    def judge(self, step: StepRequest, context: CallContext) -> None:
        """The same of a step: set the epoch of its form."""
        epoch = self.epoch(step.form.server_epoch, context)
        if epoch != step.form.server_epoch:
            step.form = replace(step.form, server_epoch=epoch)  # the other is kept for steps like it
