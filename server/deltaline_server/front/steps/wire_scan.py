"""Scans of serialised protobuf messages: their top-level fields are found, and nothing is copied or parsed further.

A scan knows one type of message in its usual form, in which each field comes once and packed; of any other it says that
it is unusual. Field numbers and wire types are the descriptors'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from deltaline import wire

# Where a field's content begins and ends in the message.
Extent = tuple[int, int]

VARINT, FIXED64, LENGTH_DELIMITED, BEGIN_GROUP, END_GROUP, FIXED32 = range(6)
# The most bytes of a varint that a scan reads: 63 bits, so that nothing is cut and no sign has to be told.
VARINT_BYTES = 9
# Beyond it a varint of a narrower type would be cut or have a sign.
MAX_NARROW = 2**31 - 1

_F = FieldDescriptor
_WIRE_TYPES = {
    _F.TYPE_FIXED64: FIXED64,
    _F.TYPE_FIXED32: FIXED32,
    _F.TYPE_SFIXED32: FIXED32,
    _F.TYPE_MESSAGE: LENGTH_DELIMITED,
    _F.TYPE_BYTES: LENGTH_DELIMITED,
}
_WIDE = {_F.TYPE_UINT64, _F.TYPE_INT64}


class WireScan:
    """Steps over the top-level fields of one type of message, those named; a message with others is unusual."""

    def __init__(self, descriptor: Descriptor, *names: str) -> None:
        """names: the fields to find. Raises: ValueError for one whose tag takes more than a byte."""
        # By tag: name, wire type, bytes of an element, and the largest number that is read, -1 for no limit.
        self._fields: dict[int, tuple[str, int, int, int]] = {}
        for name in names:
            field = descriptor.fields_by_name[name]
            element = _WIRE_TYPES.get(field.type, VARINT)
            wire_type = LENGTH_DELIMITED if field.is_packed else element
            tag = field.number << 3 | wire_type
            if tag > 0x7F:
                raise ValueError(f"{name}: expected a field number of at most 15, got {field.number}")
            # What has a length has a whole number of these bytes.
            size = {FIXED64: 8, FIXED32: 4}.get(element, 1)
            self._fields[tag] = (name, wire_type, size, -1 if field.type in _WIDE else MAX_NARROW)

    def scan(self, body: bytes, at: int, end: int) -> dict[str, Any] | None:
        """Each field that is there: int of a number, Extent of what has a length. None for any unusual form.

        A field that comes twice is unusual too: so a message holds no bytes but those of its fields.
        """
        fields = self._fields
        found: dict[str, Any] = {}
        while at < end:
            field = fields.get(body[at])
            if field is None:
                return None
            name, wire_type, size, most = field
            at += 1
            if name in found:
                return None
            if wire_type == FIXED64:
                found[name] = int.from_bytes(body[at : at + 8], "little")
                at += 8
                continue
            value = shift = 0
            for byte in body[at : at + VARINT_BYTES]:
                at += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
            else:
                return None
            if wire_type == VARINT:
                if value > most >= 0:
                    return None
                found[name] = value
            else:
                if value % size:
                    return None
                found[name] = at, at + value
                at += value
        return found if at == end else None


def read_varints(body: bytes, extent: Extent, most_bytes: int) -> list[int] | None:
    """Packed varints of up to 63 bits; None for wider ones, or for more than so many bytes."""
    begin, end = extent
    values: list[int] = []
    if end - begin > most_bytes:
        return None
    value = shift = 0
    for byte in body[begin:end]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value = shift = 0
        elif shift == 7 * VARINT_BYTES:
            return None
    return None if shift else values


def bytes_beside(body: bytes, inside: Mapping[int, Any], most_fields: int) -> int | None:
    """The bytes of a message of any form beside its tensors; None where it has more than so many fields.

    inside: what certain fields contain, by their tags: None for a tensor, else the same of a message, whose fields are
    counted too. Raises: DecodeError for some of what protobuf refuses; of the rest all that it reads is counted.
    """
    at, end = 0, len(body)
    num_bytes = end
    around: list[tuple[int, Mapping[int, Any]]] = []
    try:
        for _ in range(most_fields + 1):
            while at == end and around:
                end, inside = around.pop()
            if at == end:
                return num_bytes
            tag = body[at]
            at += 1
            if tag >= 0x80:
                tag, at = wire.read_varint(body, at - 1)
            wire_type = tag & 7
            if tag < 8:
                raise DecodeError("a field of number 0")
            if wire_type == VARINT:
                _, at = wire.read_varint(body, at)
            elif wire_type == FIXED64:
                at += 8
            elif wire_type == FIXED32:
                at += 4
            elif wire_type == BEGIN_GROUP:  # nobody knows what is in it
                around.append((end, inside))
                inside = {}
            elif wire_type == END_GROUP and around:
                end, inside = around.pop()
            elif wire_type == LENGTH_DELIMITED:
                length = body[at]
                at += 1
                if length >= 0x80:
                    length, at = wire.read_varint(body, at - 1)
                content = inside.get(tag, b"")
                if content and at + length <= end:
                    around.append((end, inside))
                    end, inside = at + length, content
                else:
                    num_bytes -= length if content is None else 0
                    at += length
            else:
                raise DecodeError(f"a tag of wire type {wire_type}")
            if at > end:
                raise DecodeError("a field ends beyond its message")
    except IndexError as error:
        raise DecodeError("the message ends within a field") from error
    return None
