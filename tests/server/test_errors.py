"""Numbers of bytes as messages have them."""

from __future__ import annotations

import pytest

from deltaline_server.errors import spelled_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        ((1 << 30) - 1, "1024 MiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_a_number_has_the_largest_unit_that_it_reaches(num_bytes: int, text: str) -> None:
    assert spelled_bytes(num_bytes) == text
