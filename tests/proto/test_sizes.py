"""Numbers of bytes as messages and tables have them, and as options are written."""

from __future__ import annotations

import pytest

from deltaline.sizes import parse_bytes, readable_bytes, spelled_bytes


@pytest.mark.parametrize(
    ("num_bytes", "message", "table"),
    [
        (0, "0 bytes", "0 B"),
        (1023, "1023 bytes", "1023 B"),
        (1024, "1 KiB", "1.0 KiB"),
        (1_047_552, "1023 KiB", "1023.0 KiB"),
        ((1 << 20) - 1, "1 MiB", "1.0 MiB"),
        (3 << 19, "1.5 MiB", "1.5 MiB"),
        ((1 << 30) - 1, "1 GiB", "1.0 GiB"),
        (5 << 39, "2.5 TiB", "2.5 TiB"),
        (5 << 51, "1.024e+04 TiB", "10240.0 TiB"),
    ],
)
def test_a_number_has_the_largest_unit_of_which_it_is_one(num_bytes: int, message: str, table: str) -> None:
    assert (spelled_bytes(num_bytes), readable_bytes(num_bytes)) == (message, table)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("65536", 65536), ("2GiB", 2**31), ("0.5mib", 2**19), ("3MB", 3_000_000), ("1TB", 10**12)]
)
def test_what_is_written_has_a_unit_or_none(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "2GiBs", "1.5", "infGiB"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_bytes(text)
