"""A kept reply as bytes of a state: what it answered, by which a retry is recognised, and its outputs.

    kind, which outputs, zeros, accepted, bytes that stand for the hidden states, rows, position asked, position told
    the hidden states or their checksum | the outputs

Little-endian. A reply that tells of snapshots has none: they stay where they are.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError
from deltaline_server.finite import CHECKSUM_BYTES, all_finite
from deltaline_server.snapshots.header import Flaw, StateFileError
from deltaline_server.snapshots.layout import MAX_COUNT, Bytes
from deltaline_server.step import WHOLE_REQUEST_BYTES, OutputRows, RowKind
from deltaline_server.tables.kept_replies import Fingerprint, KeptReply

_FIXED = struct.Struct("<BBHiIIqq")


def reply_bytes(reply: KeptReply | None) -> int:
    """Bytes that a reply takes; 0 for none, and for one that does not travel."""
    if reply is None or reply.fingerprint.waypoints is not None:
        return 0
    return _FIXED.size + len(reply.fingerprint.hidden) + reply.hidden.nbytes


def write_reply(reply: KeptReply, memory: Bytes) -> None:
    """Fill memory uint8 [reply_bytes]."""
    asked = reply.fingerprint
    fixed = _FIXED.pack(
        asked.kind,
        asked.output,
        0,
        asked.accepted,
        len(asked.hidden),
        len(reply.hidden),
        asked.position,
        reply.position,
    )
    begin = len(fixed) + len(asked.hidden)
    memory[:begin] = np.frombuffer(fixed + asked.hidden, dtype=np.uint8)
    memory[begin:] = np.ascontiguousarray(reply.hidden).reshape(-1).view(np.uint8)


def read_reply(memory: Bytes, dtype: np.dtype[Any], width: int) -> KeptReply:
    """The reply in memory uint8 [n], a copy. dtype, width: of a span's output rows.

    Raises StateFileError where no reply is like that; RequestError NON_FINITE_INPUT.
    """
    if len(memory) < _FIXED.size:
        raise _flaw(f"{_FIXED.size} bytes at least, got {len(memory)}")
    fixed = _FIXED.unpack(memory[: _FIXED.size].tobytes())
    kind, output, zero, accepted, asked_bytes, rows, asked_position, position = fixed
    begin = _FIXED.size + asked_bytes
    size = begin + rows * width * dtype.itemsize
    if len(memory) != size:
        raise _flaw(f"{size} bytes as it says, got {len(memory)}")
    if kind not in set(RowKind) or output not in set(OutputRows) or zero or accepted < -1:
        raise _flaw(f"that of a row, got kind {kind}, output {output}, accepted {accepted}")
    if not (0 <= asked_position <= MAX_COUNT and 0 <= position <= MAX_COUNT):
        raise _flaw(f"positions of 0 .. {MAX_COUNT}, got {asked_position} and {position}")
    if asked_bytes > max(WHOLE_REQUEST_BYTES, CHECKSUM_BYTES):
        raise _flaw(f"at most {WHOLE_REQUEST_BYTES} bytes for the hidden states, got {asked_bytes}")
    hidden: NDArray[Any] = memory[begin:].copy().view(dtype).reshape(rows, width)
    if rows and not all_finite(hidden):
        message = "reply: expected finite values, got some that are not"
        raise RequestError(Reason.NON_FINITE_INPUT, message, field="chunk")
    asked = Fingerprint(kind, asked_position, accepted, output, memory[_FIXED.size : begin].tobytes(), None)
    return KeptReply(asked, hidden, position)


def _flaw(expected: str) -> StateFileError:
    return StateFileError(Flaw.SECTIONS, f"reply: expected {expected}")
