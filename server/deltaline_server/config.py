"""The configuration: one frozen dataclass, its limits, and how the command line, environment and file are read into it.

Every option is a flag, a variable DELTALINE_* and a key of a TOML file; a flag goes before the variable, the variable
before the file, the file before the default. No other module reads the environment. Knows options, not who uses them.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from deltaline_server import __version__
from deltaline_server.log import FORMATS, LEVELS

PREFIX = "DELTALINE_"
MAX_CONFIG_BYTES = 1 << 20
# Linux's sun_path, without the zero at its end.
MAX_UDS_BYTES = 107
_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_DESCRIPTION = """\
Serves the Gated DeltaNet layers of a language model, and holds their recurrent state, behind gRPC.
Give it a model directory as Hugging Face writes it:  deltaline-server --model ./Qwen3.5-4B --layers 0:3
Or random weights, to try it or to measure it:        deltaline-server --random-init config.json"""
_EPILOG = """\
Each option may come from the command line (--max-sequences 64), the environment (DELTALINE_MAX_SEQUENCES=64) or a
TOML file (max_sequences = 64; --config or DELTALINE_CONFIG names it), in this order. Bytes may be written as 4MiB."""


class ConfigError(ValueError):
    """An option can't be used as given. The message is one line: the option, what was expected and what was got."""


def _option(
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


@dataclass(frozen=True)
class Config:
    """What the server is started with. Raises ConfigError when made with values that can't be used."""

    model: str | None = _option(None, "model", "model directory: config.json and *.safetensors", metavar="DIR")
    random_init: str | None = _option(
        None, "model", "config.json of a model whose weights are drawn at random", metavar="PATH"
    )
    seed: int = _option(0, "model", "seed of the random weights", low=0, high=2**63 - 1)
    layers: str | None = _option(None, "model", "layers that may be served, FIRST:END (END not included); default all")
    spans: str | None = _option(
        None,
        "model",
        "what a step addresses, FIRST:END,FIRST:END,...; default one span of all layers (block), one per layer (mixer)",
    )
    scope: str = _option(
        "block", "model", "what a layer computes: the whole block, or its mixer", choices=("block", "mixer")
    )
    device: str = _option(
        "auto", "model", "where it computes; auto takes a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    dtype: str = _option(
        "auto",
        "model",
        "weights and hidden states; auto is the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    max_sequences: int = _option(256, "state", "sequences held at a time, and rows of a request", low=1, high=2**20)
    max_draft_tokens: int = _option(8, "state", "tokens of a VERIFY row, at most", low=1, high=32)
    state_dtype: str = _option("float32", "state", "recurrent state", choices=("float32", "bfloat16"))
    state_bytes: int = _option(0, "state", "cap of the state in bytes; more is refused at start; 0 for none", low=0)
    reply_bytes: int = _option(2**28, "state", "bytes of replies kept for retries, at most", low=1)
    default_lease_ms: int = _option(600_000, "state", "lease of a sequence that asks for none, milliseconds", low=1)
    max_lease_ms: int = _option(86_400_000, "state", "longest lease, milliseconds", low=1, high=2**53)
    lease_tick_s: float = _option(1.0, "state", "how often leases are looked at, seconds", low=0.01, high=3600)

    chunk_tokens: int = _option(2048, "batches", "tokens of long rows per batch, at most (prefill chunk)", low=64)
    batch_rows: int = _option(256, "batches", "short rows (decode, verify) per batch, at most", low=1, high=4096)
    queue_rows: int = _option(4096, "batches", "rows that may wait or run", low=1)
    queue_bytes: int = _option(2**28, "batches", "bytes of hidden states that may wait or run", low=1)

    host: str = _option("127.0.0.1", "network", "address to listen on, for steps and metrics")
    port: int = _option(50051, "network", "port of gRPC; 0 for any", low=0, high=65535)
    uds: str | None = _option(None, "network", "listen on this Unix socket as well", metavar="PATH")
    metrics_port: int = _option(
        9464, "network", "port of the Prometheus metrics; 0 for any, -1 for none", low=-1, high=65535
    )
    inline_limit_bytes: int = _option(2**22, "network", "bytes of a tensor in a message, at most", low=1024, high=2**30)
    shared_memory_bytes: int = _option(
        0, "network", "bytes of memory shared with clients of this user on this host, at most; 0 for none", low=0
    )

    drain_timeout_s: float = _option(
        30.0, "process", "how long open sequences are served after SIGTERM, seconds", low=0
    )
    threads: int = _option(0, "process", "CPU threads of the computation; 0 leaves it to PyTorch", low=0, high=4096)
    log_level: str = _option("info", "process", "least level that is logged", choices=LEVELS)
    log_format: str = _option("text", "process", "one event a line, for people or for collectors", choices=FORMATS)
    check: bool = _option(False, "process", "check the options and the model's files, then exit with 0 or 1")

    def __post_init__(self) -> None:
        """Check every value that can be judged without the model."""
        for option in fields(self):
            _check(option, getattr(self, option.name))
        if (self.model is None) == (self.random_init is None):
            got = "neither" if self.model is None else "both"
            raise ConfigError(f"--model, --random-init: expected one of them, got {got}")
        if self.default_lease_ms > self.max_lease_ms:
            raise ConfigError(f"--default-lease-ms: expected at most {self.max_lease_ms}, got {self.default_lease_ms}")
        if self.shared_memory_bytes and not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"--shared-memory-bytes: expected 0, as only Linux has it, got {self.shared_memory_bytes}"
            )
        if self.uds is not None:
            _check_uds(self.uds)
        if self.layers is not None:
            _range(self.layers, "--layers")
        for text in () if self.spans is None else self.spans.split(","):
            _range(text, "--spans")

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Read the options from arguments, environment and file.

        Raises ConfigError; SystemExit(0) after --help and --version.
        """
        flags = vars(_parser().parse_args(argv))
        path = flags.pop("config", environ.get(PREFIX + "CONFIG"))
        values: dict[str, Any] = _read_file(Path(path)) if path else {}
        for option in fields(cls):
            variable = PREFIX + option.name.upper()
            if variable in environ:
                values[option.name] = _from_text(option, environ[variable], variable)
            if option.name in flags:
                values[option.name] = _from_text(option, flags[option.name], _flag(option.name))
        return cls(**values)

    @property
    def layer_range(self) -> range | None:
        """The layers that may be served, None for all."""
        return None if self.layers is None else _range(self.layers, "--layers")

    @property
    def span_ranges(self) -> tuple[range, ...] | None:
        """The declared spans, None for the default ones."""
        return None if self.spans is None else tuple(_range(text, "--spans") for text in self.spans.split(","))


def local_address(environ: Mapping[str, str]) -> str:
    """The address at which a server with this environment listens on its own machine."""
    return f"127.0.0.1:{environ.get(PREFIX + 'PORT', Config.port)}"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables DELTALINE_* that are no option, such as misspelt ones.

    Not those that Kubernetes sets in every pod for a Service named deltaline: DELTALINE_SERVICE_*, DELTALINE_PORT_*.
    """
    known = {PREFIX + "CONFIG", *(PREFIX + option.name.upper() for option in fields(Config))}
    return sorted(
        name
        for name in environ
        if name.startswith(PREFIX) and name not in known and "_SERVICE_" not in name and "_PORT" not in name
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Usage errors are ConfigErrors like all others."""
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    """All flags; a flag that is not given leaves no value behind."""
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
    for option in fields(Config):
        name, metadata = option.metadata["group"], option.metadata
        group = groups.setdefault(name, None) or parser.add_argument_group(name)
        groups[name] = group
        if _kind(option) is bool:
            group.add_argument(_flag(option.name), action="store_const", const="true", help=metadata["text"])
        else:
            metavar = "|".join(metadata["choices"]) or (metadata["metavar"] if _kind(option) is str else "N")
            group.add_argument(_flag(option.name), metavar=metavar, help=metadata["text"] + _shown(option))
    return parser


def _read_file(path: Path) -> dict[str, Any]:
    """The options of a TOML file; unknown keys and values of a wrong type are refused by name."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"--config: expected at most {MAX_CONFIG_BYTES} bytes in {path}")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config: {path} can't be read: {why}") from error
    options = {option.name: option for option in fields(Config)}
    unknown = sorted(values.keys() - options.keys())
    if unknown:
        raise ConfigError(f"{path}: unknown option {', '.join(unknown)}")
    return {name: _from_toml(options[name], value, f"{path}: {name}") for name, value in values.items()}


def _from_toml(option: Field[Any], value: object, source: str) -> Any:
    """A TOML value; integers do for floats, and text for bytes with a unit."""
    kind = _kind(option)
    if isinstance(value, str) and (kind is str or option.name.endswith("_bytes")):
        return _from_text(option, value, source)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{source}: expected {_WORDS[kind]}, got {value!r}")
    return value


def _from_text(option: Field[Any], text: str, source: str) -> Any:
    """A value as the command line and the environment spell it."""
    kind = _kind(option)
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


def _check(option: Field[Any], value: Any) -> None:
    """A value is among the choices and within the limits."""
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if choices and value not in choices:
        raise ConfigError(f"{_flag(option.name)}: expected {', '.join(choices)}, got {value!r}")
    if low is not None and not low <= value <= (float("inf") if high is None else high):
        expected = f"at least {low}" if high is None else f"{low} .. {high}"
        raise ConfigError(f"{_flag(option.name)}: expected {expected}, got {value}")


def _check_uds(path: str) -> None:
    """A socket may be made at the path, as far as its length and its folder tell."""
    if not 0 < len(os.fsencode(path)) <= MAX_UDS_BYTES:
        raise ConfigError(f"--uds: expected a path of 1 .. {MAX_UDS_BYTES} bytes, got {path!r}")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--uds: expected a socket in a folder that exists, got {path!r}")


def _range(text: str, flag: str) -> range:
    """FIRST:END as a range."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end) <= 2**31):
        raise ConfigError(f"{flag}: expected FIRST:END with FIRST < END, got {text!r}")
    return range(int(first), int(end))


def _shown(option: Field[Any]) -> str:
    """The default as the help shows it; of None, 0 and False the option's text says what they mean."""
    default: Any = option.default
    if not default:
        return ""
    return f" [{default >> 20}MiB]" if option.name.endswith("_bytes") else f" [{default}]"


def _kind(option: Field[Any]) -> type:
    """The type of an option's value; options without a default are text."""
    return str if option.default is None else type(option.default)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
