"""One option: the values that it takes, and how what is written becomes one; what is wrong is told in one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from deltaline.sizes import parse_bytes
from deltaline_server import errors
from deltaline_server.config.paths import why_refused
from deltaline_server.log import FORMATS

_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_BYTES = "a number of bytes such as 4MiB, its unit KiB, MiB, GiB, TiB, KB, MB, GB, TB or none"
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# More than any host or device has, and within 64 bits however it is multiplied by an element's size.
MAX_BYTES = 2**50
# What the help calls a value that is a path.
PATHS = ("PATH", "DIR", "DIR|ORG/NAME")


class ConfigError(ValueError):
    """An option can't be used as given. The message is one line: the option, what was expected and what was got.

    log_format: what the log was asked to be, as far as that could be read.
    """

    log_format = FORMATS[0]


@dataclass(frozen=True)
class Options:
    """Options of one theme, which checks what they mean together. Raises ConfigError."""

    def __post_init__(self) -> None:
        """Check each by itself."""
        for option in fields(self):
            check_limits(option, getattr(self, option.name))


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
    """A field of Config with its group in the help, its meaning, and the values that it takes: a number's have a lowest
    and a highest."""
    limits = {"choices": choices, "low": low, "high": high}
    return field(default=default, metadata={"group": group, "text": text, "metavar": metavar, **limits})


def check_path(flag: str, path: str) -> None:
    """The system takes such a path, whatever is there."""
    why = why_refused(path)
    if why:
        raise ConfigError(f"{flag}: expected a path that the system takes, got {errors.shown(path)} ({why})")


def from_toml(option: Field[Any], value: object, source: str) -> Any:
    """A TOML value; integers do for floats, and text for bytes with a unit."""
    kind = kind_of(option)
    if isinstance(value, str) and (kind is str or option.name.endswith("_bytes")):
        return from_text(option, value, source)
    if kind is float and type(value) is int and value.bit_length() < sys.float_info.max_exp:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{source}: expected {_WORDS[kind]}, got {errors.shown(value)}")
    return value


def from_text(option: Field[Any], text: str, source: str) -> Any:
    """A value as the command line and the environment spell it."""
    kind = kind_of(option)
    try:
        if kind is bool:
            return _BOOLS[text.lower()]
        if option.name.endswith("_bytes"):
            return parse_bytes(text)
        return kind(text)
    except (KeyError, ValueError, OverflowError) as error:
        expected = _BYTES if option.name.endswith("_bytes") else _WORDS[kind]
        raise ConfigError(f"{source}: expected {expected}, got {errors.shown(text)}") from error


def check_limits(option: Field[Any], value: Any) -> None:
    """A value is among the choices, within the limits, or a path that there can be."""
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if option.metadata["metavar"] in PATHS and value is not None:
        check_path(flag(option.name), value)
    if choices and value not in choices:
        raise ConfigError(f"{flag(option.name)}: expected {', '.join(choices)}, got {errors.shown(value)}")
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{flag(option.name)}: expected {low} .. {high}, got {errors.shown(value)}")


def shown(option: Field[Any]) -> str:
    """The default as the help shows it; of None the option's text says what it means."""
    default: Any = option.default
    if default is None:
        return ""
    return f" [{default >> 20}MiB]" if default and option.name.endswith("_bytes") else f" [{default}]"


def kind_of(option: Field[Any]) -> type:
    """The type of an option's value; options without a default are text."""
    return str if option.default is None else type(option.default)


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")
