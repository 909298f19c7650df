"""One option of the configuration: a field with its group in the help, its meaning and its limits, and how its value is
read from text and from TOML.

Knows one option at a time; not which there are (config.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, field
from typing import Any

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class ConfigError(ValueError):
    """An option can't be used as given. The message is one line: the option, what was expected and what was got."""


def setting(
    default: Any,
    group: str,
    text: str,
    *,
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    metavar: str = "TEXT",
) -> Any:
    """A field of Config with its group in the help, its meaning, and the values that it takes."""
    limits = {"choices": choices, "low": low, "high": high}
    return field(default=default, metadata={"group": group, "text": text, "metavar": metavar, **limits})


def from_toml(option: Field[Any], value: object, source: str) -> Any:
    """A TOML value; integers do for floats, and text for bytes with a unit."""
    kind = kind_of(option)
    if isinstance(value, str) and (kind is str or option.name.endswith("_bytes")):
        return from_text(option, value, source)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{source}: expected {_WORDS[kind]}, got {value!r}")
    return value


def from_text(option: Field[Any], text: str, source: str) -> Any:
    """A value as the command line and the environment spell it."""
    kind = kind_of(option)
    try:
        if kind is bool:
            return _BOOLS[text.lower()]
        if option.name.endswith("_bytes"):
            unit = next((unit for unit in _UNITS if text.upper().endswith(unit)), "")
            return int(float(text[: -len(unit)]) * _UNITS[unit]) if unit else int(text)
        return kind(text)
    except (KeyError, ValueError, OverflowError) as error:
        expected = "a number of bytes such as 4MiB" if option.name.endswith("_bytes") else _WORDS[kind]
        raise ConfigError(f"{source}: expected {expected}, got {text!r}") from error


def check_limits(option: Field[Any], value: Any) -> None:
    """A value is among the choices and within the limits."""
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise ConfigError(f"{flag(option.name)}: expected {', '.join(choices)}, got {value!r}")
    if low is not None and not low <= value <= (float("inf") if high is None else high):
        expected = f"at least {low}" if high is None else f"{low} .. {high}"
        raise ConfigError(f"{flag(option.name)}: expected {expected}, got {value}")


def shown(option: Field[Any]) -> str:
    """The default as the help shows it; of None, 0 and False the option's text says what they mean."""
    default: Any = option.default
    if not default:
        return ""
    return f" [{default >> 20}MiB]" if option.name.endswith("_bytes") else f" [{default}]"


def kind_of(option: Field[Any]) -> type:
    """The type of an option's value; options without a default are text."""
    return str if option.default is None else type(option.default)


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")
