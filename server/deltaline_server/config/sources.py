"""Where options come from: the command line before the environment, that before a TOML file.

Knows options by their fields, not what they mean together. No other module reads the environment.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from typing import Any

from deltaline_server import __version__, errors
from deltaline_server.config.option import ConfigError, check_path, flag, from_text, from_toml, kind_of, shown
from deltaline_server.config.paths import reason_of
from deltaline_server.log import FORMATS

MAX_CONFIG_BYTES = 1 << 20
PREFIX = "DELTALINE_"
Fields = Sequence[Field[Any]]
_DESCRIPTION = """\
Serves recurrent layers (Gated DeltaNet, KDA, Mamba, short convolutions) and what is between them of a language model,
and holds their state, behind gRPC.
Give it a model directory as Hugging Face writes it:  deltaline-server --model ./Qwen3.5-4B --layers 0:3
Or random weights, to try it or to measure it:        deltaline-server --random-init config.json"""
_EPILOG = """\
Each option may come from the command line (--max-sequences 64), the environment (DELTALINE_MAX_SEQUENCES=64) or a
TOML file (max_sequences = 64; --config or DELTALINE_CONFIG names it), in this order. Bytes may be written as 4MiB."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Usage errors are ConfigErrors like all others."""
        raise ConfigError(message)


def flags_of(options: Fields, argv: Sequence[str]) -> dict[str, Any]:
    """The flags that are given, --config among them. Raises ConfigError; SystemExit(0) after --help and --version."""
    parser = _Parser(
        prog="deltaline-server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--config", metavar="PATH", help="TOML file with options")
    groups: dict[str, Any] = {}
    for option in options:
        name, metadata = option.metadata["group"], option.metadata
        group = groups.setdefault(name, None) or parser.add_argument_group(name)
        groups[name] = group
        if kind_of(option) is bool:
            group.add_argument(flag(option.name), action="store_const", const="true", help=metadata["text"])
        else:
            metavar = "|".join(metadata["choices"]) or (metadata["metavar"] if kind_of(option) is str else "N")
            group.add_argument(flag(option.name), metavar=metavar, help=metadata["text"] + shown(option))
    return vars(parser.parse_args(argv))


def asked_log_format(argv: Sequence[str], environ: Mapping[str, str], file: Mapping[str, Any] | None = None) -> str:
    """The format of the log that is asked for, as far as it can be told where another option is wrong.

    file: what the options' file has, where it was read; it is not read again, as it may be a pipe.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=environ.get(PREFIX + "CONFIG"))
    parser.add_argument("--log-format", default=environ.get(PREFIX + "LOG_FORMAT"))
    asked: object = None
    with suppress(ConfigError):
        known, _ = parser.parse_known_args(argv)
        asked = known.log_format
        if asked is None and known.config:
            asked = (read_toml(known.config) if file is None else file).get("log_format")
    return asked if isinstance(asked, str) and asked in FORMATS else FORMATS[0]


def values_of(
    options: Fields, flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that are given: a flag's before the environment's, and that before the file's. Raises ConfigError."""
    values = dict(file)
    for option in options:
        variable = PREFIX + option.name.upper()
        if variable in environ:
            values[option.name] = from_text(option, environ[variable], variable)
        if option.name in flags:
            values[option.name] = from_text(option, flags[option.name], flag(option.name))
    return values


def options_of(options: Fields, values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The options of a TOML file; unknown keys and values of a wrong type are refused by name."""
    known = {option.name: option for option in options}
    unknown = [key if key.isidentifier() else errors.shown(key) for key in sorted(values.keys() - known.keys())]
    if unknown:
        raise ConfigError(f"{path}: unknown option {', '.join(unknown)}")
    return {name: from_toml(known[name], value, f"{path}: {name}") for name, value in values.items()}


def read_toml(path: str) -> dict[str, Any]:
    """What a TOML file has. Reads it once, since it may be a pipe. Raises ConfigError."""
    check_path("--config", path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigError(f"--config: expected at most {MAX_CONFIG_BYTES} bytes in {path}, got more")
        return tomllib.loads(content.decode())
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError also of integers that Python does not read
        why = "it is nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
        raise ConfigError(f"--config: {path} can't be read: {why}") from error
