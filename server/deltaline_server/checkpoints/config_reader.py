"""Reads configs in JSON: the text, typed values by key, and the error that names what is wrong."""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from deltaline_server.errors import shown

# The largest fp32 number, (2 - 2^-23) * 2^127: an integer of JSON may be larger than any float. The smallest positive
# one that is not a subnormal, which devices may take for zero.
MAX_FLOAT = (2.0 - 2.0**-23) * 2.0**127
MIN_FLOAT = 2.0**-126


class ModelError(ValueError):
    """The model, or an adapter of it, can't be served as asked.

    The message names what is at fault, what was expected, what was got.
    """


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most `max_bytes`. Raises ModelError naming the file, without its folders."""
    size = file_bytes(path)
    if size > max_bytes:
        raise ModelError(f"{path.name}: expected at most {max_bytes} bytes, got {size}")
    try:
        return parse_json_object(path.read_bytes(), path.name)
    except OSError as error:
        raise ModelError(f"{path.name}: can't be read ({error.strerror})") from error


def file_bytes(path: Path) -> int:
    """Return the size of a regular file: reading another kind may block, or never end.

    Raises ModelError naming it, without its folders.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path.name}: can't be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path.name}: expected a regular file, got something else")
    return status.st_size


def parse_json_object(text: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ModelError naming it by `name`."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: expected JSON, got something else ({error})") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{name}: expected a JSON object, got {shown(parsed)}")
    return parsed


class ConfigReader:
    """Typed access to the keys of a config; `prefix` is what messages put before a key."""

    def __init__(self, values: object, prefix: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{prefix.rstrip('.')}: expected an object, got {shown(values)}")
        self._values = values
        self._prefix = prefix

    def get(self, key: str) -> Any:
        """The value, None where it is absent."""
        return self._values.get(key)

    def says(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def spelling(self, *keys: str) -> str:
        """The first of several spellings of a key that has a value, else the first that is there, else the last."""
        there = [key for key in keys if self.says(key)]
        return next((key for key in there if self.get(key) is not None), there[0] if there else keys[-1])

    def nested(self, key: str) -> ConfigReader:
        """Access to the keys of an object under `key`. Raises ModelError where there is something else."""
        return ConfigReader(self.get(key), f"{self._prefix}{key}.")

    def only(self, known: Collection[str]) -> None:
        """Raise ModelError naming a key that is none of those."""
        for key in self._values:
            if key not in known:
                raise ModelError(f"{self._prefix}{shown(key)}: expected none (it is not known), got one")

    def fail(self, key: str, expected: str) -> ModelError:
        """The error that `key` is not as expected."""
        got = shown(self._values[key]) if key in self._values else "nothing"
        return ModelError(f"{self._prefix}{key}: expected {expected}, got {got}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"an integer in {low}..{high}")
        return value

    def positive(self, key: str, default: float | None = None, *, or_zero: bool = False) -> float:
        value = self._values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (MIN_FLOAT <= value <= MAX_FLOAT or (or_zero and value == 0)):
            raise self.fail(key, "a positive number that fp32 holds" + (", or 0" if or_zero else ""))
        return float(value)

    def negative(self, key: str) -> float | None:
        """A number below 0; None where it is absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not MIN_FLOAT <= -value <= MAX_FLOAT:
            raise self.fail(key, "a negative number that fp32 holds, or null")
        return float(value)

    def positives(self, key: str, count: int) -> tuple[float, ...] | None:
        """A list of so many; None where it is absent."""
        values = self._values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != count:
            raise self.fail(key, f"{count} positive numbers that fp32 holds")
        return tuple(ConfigReader({key: value}, self._prefix).positive(key) for value in values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def choice(self, key: str, *known: str | None) -> str | None:
        """One of these values; the first where the key is absent."""
        value = self._values.get(key, known[0])
        for one in known:
            if value == one:
                return one
        raise self.fail(key, " or ".join(map(repr, known)))

    def require(self, key: str, expected: str, default: str) -> None:
        if self._values.get(key, default) != expected:
            raise self.fail(key, f"'{expected}'")
