"""The stream of steps of a link's connection: opened with the first step, and anew after it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltaline.conversation import Conversation, LinkCall
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeltalineError
from deltaline_client._transport.flow import Answer
from deltaline_client._transport.messages import read_stream_response, stream_request
from deltaline_client._transport.methods import STEP_STREAM
from deltaline_client._transport.pending import Pending
from deltaline_client._transport.tracing import metadata, traceparent


class LinkSteps:
    """Sends steps, and hands their answers to whom they are for."""

    def __init__(self, conversation: Conversation[DeltalineError]) -> None:
        self._conversation = conversation
        self._call: LinkCall[DeltalineError] | None = None
        self._pending = Pending()

    def send(self, number: int, request: Sequence[Buffer], deliver: Callable[[Answer], object]) -> None:
        """Let a step go with the next flush; its answer, or what ended the stream, is delivered under `number`."""
        if self._conversation.error is not None:
            deliver((number, self._conversation.error))
            return
        if self._call is None or self._call.is_over:
            pending = self._pending = Pending()
            self._call = self._conversation.begin(STEP_STREAM, self._take, pending.fail, metadata=metadata())
        message = stream_request(self._pending.add(number, deliver), request, traceparent())
        self._conversation.send(self._call, message)

    def _take(self, body: bytes) -> None:
        try:
            self._pending.deliver(*read_stream_response(body))
        except DeltalineError as unreadable:
            if self._call is not None:
                self._conversation.cancel(self._call)
            self._pending.fail(unreadable)
