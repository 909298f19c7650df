"""Messages spoiled by chance: bytes, fields as protobuf writes them, and values at their bounds.

Knows protobuf's encoding and a message's descriptor; not what a field means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from deltaline.wire import varint

VARINT, FIXED64, LENGTH_DELIMITED, GROUP, END_GROUP, FIXED32 = range(6)
# Most bytes of what is repeated many times: below what a message may have, so that the server has to look at it.
BLOWN_UP_BYTES = 60_000
BOUNDS = (0, 1, 2, 3, 7, 63, 64, 65, 127, 128, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1)

_F = FieldDescriptor
_TEXTS = ("", ".", "..", "../a", "a" * 64, "a" * 65, "a\0b", "\u00fc", "a" * 5000, "%s{0}")


class Field(NamedTuple):
    """A field as it lies in a message. content: without tag and length."""

    number: int
    wire_type: int
    content: bytes

    def encoded(self) -> bytes:
        length = varint(len(self.content)) if self.wire_type == LENGTH_DELIMITED else b""
        return varint(self.number << 3 | self.wire_type) + length + self.content


def mutated(body: bytes, descriptor: Descriptor, rng: Random) -> bytes:
    """The message, spoiled in one to three ways; some are messages still."""
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.3:
            body = with_bytes_mutated(body, rng)
        elif kind < 0.65:
            body = _fields_mutated(body, descriptor, rng)
        elif kind < 0.97:
            body = _at_a_bound(body, descriptor, rng)
        else:
            body = rng.randbytes(rng.choice((0, 1, 2, 5, 20, 100, 3000)))
    return body


def with_bytes_mutated(body: bytes, rng: Random) -> bytes:
    """Flip, cut, insert or repeat some bytes, mostly near the front where the small fields are."""
    data = bytearray(body or b"\0")
    at = rng.randrange(min(len(data), 120) if rng.random() < 0.8 else len(data))
    match rng.randrange(6):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.randrange(256)
        case 2:
            del data[at : at + rng.randrange(1, 9)]
        case 3:
            del data[at:]
        case 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        case _:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
    return bytes(data)


def _fields_mutated(body: bytes, descriptor: Descriptor, rng: Random) -> bytes:
    """Spoil the encoding of a field, or of one within it; what can't be read stays as it is."""
    found = _fields(body)
    if not found:
        return Field(rng.randrange(1, 20), LENGTH_DELIMITED, rng.randbytes(3)).encoded()
    at = rng.randrange(len(found))
    field, known = found[at], descriptor.fields_by_number.get(found[at].number)
    pieces = [one.encoded() for one in found]
    if known is not None and known.message_type is not None and rng.random() < 0.6:
        inner = mutated(field.content, known.message_type, rng)
        pieces[at] = Field(field.number, LENGTH_DELIMITED, inner).encoded()
    else:
        other = rng.randrange(len(found))
        pieces[at : at + 1] = rng.choice(_SPOILS)(field, found[other], rng)
    return b"".join(pieces)


def _fields(body: bytes) -> list[Field] | None:
    """The fields of a message; None for bytes that are none."""
    found, at = [], 0
    while at < len(body):
        tag, at = _read_varint(body, at)
        wire_type, begin = tag & 7, at
        if wire_type == VARINT:
            _, at = _read_varint(body, at)
        elif wire_type == LENGTH_DELIMITED:
            length, begin = _read_varint(body, at)
            at = begin + length
        elif wire_type in (FIXED64, FIXED32):
            at += 8 if wire_type == FIXED64 else 4
        else:
            return None
        if at > len(body):
            return None
        found.append(Field(tag >> 3, wire_type, body[begin:at]))
    return found


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body):
        value |= (body[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if body[at - 1] < 0x80:
            break
    return value, at


def _twice(field: Field, other: Field, rng: Random) -> list[bytes]:
    return [field.encoded()] * rng.choice((2, 2, 3, 9))


def _swapped(field: Field, other: Field, rng: Random) -> list[bytes]:
    """The content of another field, or another before it."""
    return [field._replace(wire_type=other.wire_type, content=other.content).encoded(), other.encoded()]


def _left_out(field: Field, other: Field, rng: Random) -> list[bytes]:
    return []


def _of_another_type(field: Field, other: Field, rng: Random) -> list[bytes]:
    return [field._replace(wire_type=rng.randrange(8)).encoded()]


def _of_another_number(field: Field, other: Field, rng: Random) -> list[bytes]:
    return [field._replace(number=rng.choice((0, rng.randrange(1, 16), 2**29 - 1, 2**29, 2**40))).encoded()]


def _huge_varint(field: Field, other: Field, rng: Random) -> list[bytes]:
    value = rng.choice((varint(rng.choice(BOUNDS)), b"\xff" * 9 + b"\x01", b"\xff" * 10 + b"\x01", b"\x81\x80\x80\x00"))
    return [varint(field.number << 3) + value]


def _length_beyond(field: Field, other: Field, rng: Random) -> list[bytes]:
    """A length that its content has not, one byte more or less, or very many."""
    length = max(0, len(field.content) + rng.choice((-8, -1, 1, 8, 1000, 2**31, 2**32, 2**63)))
    return [varint(field.number << 3 | LENGTH_DELIMITED), varint(length), field.content]


def _unpacked(field: Field, other: Field, rng: Random) -> list[bytes]:
    """A column's entries one by one, or in two parts."""
    size, content = rng.choice((1, 4, 8)), field.content
    if rng.random() < 0.5:
        cut = len(content) // 2 // size * size
        return [field._replace(content=part).encoded() for part in (content[:cut], content[cut:])]
    wire_type = {1: VARINT, 4: FIXED32, 8: FIXED64}[size]
    entries = [content[i : i + size] for i in range(0, min(len(content), 800), size)]
    return [Field(field.number, wire_type, entry).encoded() for entry in entries]


def _packed(field: Field, other: Field, rng: Random) -> list[bytes]:
    return [field._replace(wire_type=LENGTH_DELIMITED, content=field.content * rng.choice((1, 2, 3))).encoded()]


def _blown_up(field: Field, other: Field, rng: Random) -> list[bytes]:
    """Very long, or very many."""
    if rng.random() < 0.5:
        encoded = field.encoded()
        return [encoded] * min(2000, BLOWN_UP_BYTES // len(encoded))
    content = field.content or b"\x01"
    return [field._replace(wire_type=LENGTH_DELIMITED, content=content * (BLOWN_UP_BYTES // len(content))).encoded()]


def _deep(field: Field, other: Field, rng: Random) -> list[bytes]:
    """Groups or messages in each other, deeper than a parser follows."""
    depth = rng.choice((50, 101, 5000))
    if rng.random() < 0.5:
        return [varint(field.number << 3 | GROUP) * depth, varint(field.number << 3 | END_GROUP) * depth]
    content = field.content
    for _ in range(min(depth, 120)):
        content = Field(field.number, LENGTH_DELIMITED, content).encoded()
    return [content]


_SPOILS: tuple[Callable[[Field, Field, Random], list[bytes]], ...] = (
    _twice,
    _swapped,
    _left_out,
    _of_another_type,
    _of_another_number,
    _huge_varint,
    _length_beyond,
    _unpacked,
    _packed,
    _blown_up,
    _deep,
)


def _at_a_bound(body: bytes, descriptor: Descriptor, rng: Random) -> bytes:
    """A sound message with one field at a bound of its type, or near one that it may have."""
    message: Any = message_factory.GetMessageClass(descriptor)()
    try:
        message.ParseFromString(body)
    except DecodeError:
        return body
    inner, fields = message, descriptor.fields
    while fields:
        field = rng.choice(fields)
        if field.is_repeated:
            _change_column(getattr(inner, field.name), field, rng)
        elif field.message_type is not None:
            inner, fields = getattr(inner, field.name), field.message_type.fields
            continue
        else:
            setattr(inner, field.name, _bound(field, rng))
        break
    return bytes(message.SerializeToString())


def _change_column(column: Any, field: FieldDescriptor, rng: Random) -> None:
    """Change an entry of a repeated field, add some, or leave some out."""
    if field.message_type is not None:
        return
    kind = rng.randrange(4)
    if kind == 0 or not column:
        count = rng.choice((1, 2, 65, 3000))
        many = partial(rng.randbytes, 16) if field.type == _F.TYPE_BYTES else partial(rng.getrandbits, 31)
        column.extend([_bound(field, rng) if count < 3 else many() for _ in range(count)])
    elif kind == 1:
        del column[rng.randrange(len(column)) :]
    elif kind == 2:
        column.append(rng.choice(column))
    else:
        column[rng.randrange(len(column))] = _bound(field, rng)


def _bound(field: FieldDescriptor, rng: Random) -> Any:
    """A value that a field of this type can have."""
    match field.type:
        case _F.TYPE_BOOL:
            return rng.random() < 0.5
        case _F.TYPE_STRING:
            return rng.choice(_TEXTS)
        case _F.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 15, 16, 17, 55, 1000)))
        case _F.TYPE_DOUBLE | _F.TYPE_FLOAT:
            return rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
    value = rng.choice(BOUNDS)
    bits = 64 if field.cpp_type in (_F.CPPTYPE_INT64, _F.CPPTYPE_UINT64) else 32
    value &= (1 << bits) - 1
    if field.cpp_type in (_F.CPPTYPE_UINT32, _F.CPPTYPE_UINT64):
        return value
    return value - (1 << bits) if value >> (bits - 1) else value
