"""The bounds that the documentation announces are those that the server keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltaline import link
from deltaline.sizes import spelled_bytes
from deltaline_server.front import grpc_port, requests
from deltaline_server.front.ends import forward, memory, reader
from deltaline_server.front.link import held
from deltaline_server.front.link.memory import MAX_REGIONS
from deltaline_server.front.port import descriptors, gate
from deltaline_server.front.port.memory import most_bytes, most_half_sent_bytes
from deltaline_server.front.steps import stepping

DOCS = Path(__file__).parents[3] / "docs"
INLINE_BYTES = 4 << 20
MESSAGE_BYTES = INLINE_BYTES + grpc_port.MESSAGE_SLACK_BYTES
STREAM_BYTES, ALL_BYTES = (spelled_bytes(one) for one in (stepping.STREAM_BYTES, stepping.ALL_STREAMS_BYTES))
FRONT_END_BYTES, FRONT_END_MESSAGES = memory.most_bytes(0), memory.most_bytes(1) - memory.most_bytes(0)

ANNOUNCED = {
    "operations.md": [
        f"| connections | {descriptors.MAX_CONNECTIONS:,}, or what open files allow |",
        f"| calls of a connection | {grpc_port.MAX_STREAMS:,} |",
        f"| calls, idle streams too | {gate.MAX_CALLS:,}; one connection has half at most",
        f"| calls of the health service | {gate.MAX_PROBES}, of their own |",
        f"wait for [their turns](adr/0019-refusals-in-turns.md) | {gate.MAX_TURNED_AWAY:,}, of their own",
        f"| requests (not of streams) that are received at a time | {gate.RECEIVED}, connections in turn |",
        f"| such a request | {gate.REQUEST_S:g} s; {gate.HURRIED_REQUEST_S:g} s where others wait |",
        f"of calls with one reply | {spelled_bytes(gate.UNREAD_BYTES)}; "
        f"of one connection {spelled_bytes(gate.CLIENT_UNREAD_BYTES)}",
        f"| steps of streams that are not answered or read | {STREAM_BYTES} of each stream, {ALL_BYTES} of all; ",
        f"rows need, and {spelled_bytes(grpc_port.MESSAGE_SLACK_BYTES)} beside the tensor | MESSAGE_TOO_LARGE |",
        f"| calls that wait to be looked at | {grpc_port.MAX_PENDING:,} |",
        f"what all of it may take: with the defaults {spelled_bytes(most_bytes(MESSAGE_BYTES))}, and "
        f"{spelled_bytes(most_half_sent_bytes(MESSAGE_BYTES))} of streams' messages that are half sent",
        f"A stream is read up to {spelled_bytes(forward.AHEAD_BYTES)} ahead of what the core has taken",
        f"a stream's replies are computed up to {spelled_bytes(link.UNREAD_BYTES)} ahead",
        f"Of calls with one request {reader.REQUESTS} of a connection are read at a time",
        f"gRPC gets {spelled_bytes(reader.GIVEN_BYTES)}, the others wait before it. "
        f"Of all that wait a front end keeps {spelled_bytes(forward.HELD_BYTES)}",
        f"a front end's own memory to {spelled_bytes(FRONT_END_BYTES)} and {FRONT_END_MESSAGES} messages",
    ],
    "protocol.md": [
        f"have {requests.most_bytes(2**20 + 1) - requests.most_bytes(2**20)} bytes for each of `max_sequences`, "
        f"{requests.MAX_SNAPSHOTS:,} at least, and {spelled_bytes(requests.OTHER_BYTES)} besides",
        f"at most {stepping.STREAM_STEPS} steps, and {STREAM_BYTES} of tensors in messages, that are not answered",
        f"All streams together hold at most {ALL_BYTES};",
        f"A packet has at most {spelled_bytes(link.MAX_PACKET_BYTES)}.",
        f"Of one call at most {link.STREAM_MESSAGES} messages may be sent that are not TAKEN",
        f"of one connection {link.MAX_CALLS} calls may be in flight",
        f"it has at most {MAX_REGIONS} regions",
        f"beyond {spelled_bytes(held.HELD_BYTES)} and `--queue-bytes` the connection that has most of it ends",
    ],
}


@pytest.mark.parametrize(("page", "bound"), [(page, bound) for page, bounds in ANNOUNCED.items() for bound in bounds])
def test_a_bound_is_what_is_announced(page: str, bound: str) -> None:
    text = re.sub(r"\s+", " ", (DOCS / page).read_text())
    assert bound in text
