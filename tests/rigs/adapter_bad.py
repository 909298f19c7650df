"""Bad names and bad files of adapters: each of them has to be refused, wherever it comes in."""

from __future__ import annotations

import json
from typing import Any

from deltaline_server.checkpoints.tensor_file import MAX_HEADER_BYTES

BAD_NAMES = [
    "../../etc/passwd",
    "..",
    ".",
    "",
    "../outside",
    "good/../../outside",
    "good/",
    "/etc/passwd",
    "a\0b",
    "..%2f",
    "%2e%2e",
    "a" * 10_240,
    "good\n",
    "gööd",
    ".hidden",
    "a b",
    "good\\..",
]


def content_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_FILES: dict[str, bytes] = {
    "empty": b"",
    "cut in the length": b"\x10\x00",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a zip archive, as torch writes them": b"PK\x03\x04" + b"\x00" * 60,
    "a header of 2^40 bytes": (1 << 40).to_bytes(8, "little") + b"{}" * 50,
    "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}" * 50,
    "a header above the limit": (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1),
    "a header of 100 MB": (100_000_000).to_bytes(8, "little") + b"{}" * 50,
    "a header longer than the file": (9).to_bytes(8, "little") + b"{}      ",
    "100,000 entries": content_of(b"{" + b",".join(b'"%d":0' % i for i in range(100_000)) + b"}"),
    "4,097 tensors": content_of({str(i): entry([1], 4 * i, 4 * i + 4) for i in range(4098)}, b"\0" * 4 * 4098),
    "no JSON": content_of(b"garbage!"),
    "deep JSON": content_of(b'{"a":' * 100_000),
    "no text": content_of(b'{"\xff":1}'),
    "a list": content_of([1]),
    "a number that is no number": content_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"\0" * 4),
    "a name twice": content_of(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"\0" * 4,
    ),
    "a name of another alphabet": content_of({"ä": entry([1], 0, 4)}, b"\0" * 4),
    "a name with a zero": content_of({"a\0b": entry([1], 0, 4)}, b"\0" * 4),
    "a long name": content_of({"a" * 513: entry([1], 0, 4)}, b"\0" * 4),
    "an entry that is no object": content_of({"a": 1}),
    "an entry without a shape": content_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"\0" * 4),
    "an entry with more": content_of({"a": entry([1], 0, 4) | {"x": 1}}, b"\0" * 4),
    "overlapping tensors": content_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12),
    "one place for two tensors": content_of({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, b"\0" * 8),
    "no bytes in a tensor": content_of({"a": entry([1], 0, 4), "b": entry([0, 4], 4, 4)}, b"\0" * 4),
    "two empty tensors in one place": content_of({"a": entry([0], 0, 0), "b": entry([0], 0, 0)}),
    "a hole": content_of({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "truncated": content_of({"a": entry([2], 0, 8)}, b"\0" * 7),
    "bytes that belong to nothing": content_of({"a": entry([2], 0, 8)}, b"\0" * 9),
    "offsets backwards": content_of({"a": entry([1], 4, 0)}, b"\0" * 4),
    "negative offsets": content_of({"a": entry([1], -4, 0)}, b"\0" * 4),
    "offsets above 2^64": content_of({"a": entry([1], 1 << 70, (1 << 70) + 4)}, b"\0" * 4),
    "a size that wraps in 64 bits": content_of({"a": entry([1 << 33, 1 << 33], 0, 0)}),
    "a size of terabytes": content_of({"a": entry([1 << 20, 1 << 20], 0, 1 << 42)}, b"\0" * 4),
    "a negative size": content_of({"a": entry([-1, -1], 0, 4)}, b"\0" * 4),
    "a size that is true": content_of({"a": entry([True], 0, 4)}, b"\0" * 4),
    "a fractional size": content_of({"a": entry([1.0], 0, 4)}, b"\0" * 4),
    "a scalar": content_of({"a": entry([], 0, 4)}, b"\0" * 4),
    "three dimensions": content_of({"a": entry([1, 1, 1], 0, 4)}, b"\0" * 4),
    "integers": content_of({"a": entry([1], 0, 4, "I32")}, b"\0" * 4),
    "doubles": content_of({"a": entry([1], 0, 8, "F64")}, b"\0" * 8),
    "a dtype that is no text": content_of({"a": entry([1], 0, 4, ["F32"])}, b"\0" * 4),
}
