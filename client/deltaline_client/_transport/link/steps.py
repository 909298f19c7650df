"""The stream of steps of a link's connection: opened with the first step, and anew after it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from deltaline.conversation import Conversation, LinkCall
from deltaline.wire import Buffer
from deltaline_client._exceptions import DeltalineError
from deltaline_client._transport.caller import Caller, traceparent
from deltaline_client._transport.flow import Answer
from deltaline_client._transport.messages import read_stream_response, stream_request
from deltaline_client._transport.methods import STEP_STREAM
from deltaline_client._transport.pending import Pending
from deltaline_client._transport.token import Header


class LinkSteps:
    """Sends steps, and hands their answers to whom they are for."""

    def __init__(self, conversation: Conversation[DeltalineError], caller: Caller) -> None:
        """caller: the client; with another token there is another stream."""
        self._conversation, self._caller, self._token = conversation, caller, caller.token
        self._header: Header | None = None
        self._call: LinkCall[DeltalineError] | None = None
        self._pending = Pending()

    def send(self, number: int, request: Sequence[Buffer], deliver: Callable[[Answer], object]) -> None:
        """Let a step go with the next flush; its answer, or what ended the stream, is delivered under `number`."""
        if self._conversation.error is not None:
            deliver((number, self._conversation.error))
            return
        if self._token is not None:
            self._take_header(self._token.header())
        if self._call is None or self._call.is_over:
            pending = self._pending = Pending()
            take = partial(self._take, pending)
            self._call = self._conversation.begin(STEP_STREAM, take, pending.fail, metadata=self._caller.metadata())
        message = stream_request(self._pending.add(number, deliver), request, traceparent())
        self._conversation.send(self._call, message)

    def _take_header(self, header: Header) -> None:
        """End a stream that was opened with another token, once what it was sent is answered."""
        if header != self._header and self._call is not None:
            self._conversation.send(self._call, None, is_last=True)
            self._call = None
        self._header = header

    def _take(self, pending: Pending, body: bytes) -> None:
        try:
            pending.deliver(*read_stream_response(body))
        except DeltalineError as unreadable:
            if self._call is not None and pending is self._pending:
                self._conversation.cancel(self._call)
            pending.fail(unreadable)
