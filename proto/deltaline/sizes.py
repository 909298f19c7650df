"""Numbers of bytes as people write and read them."""

from __future__ import annotations

_PREFIXES = ("K", "M", "G", "T")
_UNITS = {
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
}


def parse_bytes(text: str) -> int:
    """Read a number of bytes: "65536", "256MiB", "1.5GB". Raises ValueError, OverflowError."""
    unit = next((unit for unit in _UNITS if text.upper().endswith(unit)), "")
    return int(float(text[: -len(unit)]) * _UNITS[unit]) if unit else int(text)


def spelled_bytes(num_bytes: int) -> str:
    """A number of bytes for a message: for example `1.5 GiB`, rounded to four digits; `512 bytes` below 1 KiB."""
    return _in_unit(num_bytes, ".4g") if num_bytes >= 1024 else f"{num_bytes} bytes"


def readable_bytes(num_bytes: int) -> str:
    """A number of bytes for a table: for example `1.0 GiB`, with one digit behind the point; `512 B` below 1 KiB."""
    return _in_unit(num_bytes, ".1f") if num_bytes >= 1024 else f"{num_bytes} B"


def _in_unit(num_bytes: int, digits: str) -> str:
    """In the largest unit of which it is one, as it is rounded."""
    size, prefix = num_bytes / 1024, "K"
    for prefix in _PREFIXES:
        if float(f"{size:{digits}}") < 1024 or prefix == _PREFIXES[-1]:
            break
        size /= 1024
    return f"{size:{digits}} {prefix}iB"
