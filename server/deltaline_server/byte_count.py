"""Numbers of bytes as people read them, for messages; option.py reads what people write."""

from __future__ import annotations

_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def spelled(num_bytes: int) -> str:
    """For example `1.5 GiB`, rounded to four digits; `512 bytes` below 1 KiB."""
    for shift, unit in _UNITS:
        if num_bytes >> shift:
            return f"{num_bytes / (1 << shift):.4g} {unit}"
    return f"{num_bytes} bytes"
