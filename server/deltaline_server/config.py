"""The configuration: one frozen dataclass, its limits, and how the command line, environment and file are read into it.

Every option is a flag, a variable DELTALINE_* and a key of a TOML file; a flag overrides the variable, the variable the
file, the file the default. No other module reads the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from deltaline_server import __version__, errors, local_socket
from deltaline_server.log import FORMATS, LEVELS
from deltaline_server.option import (
    ConfigError,
    check_limits,
    check_path,
    flag,
    from_text,
    from_toml,
    kind_of,
    setting,
    shown,
)
from deltaline_server.paths import HUB_NAME, cached_model, reason_of

PREFIX = "DELTALINE_"
MAX_CONFIG_BYTES = 1 << 20
# Linux's sun_path, without the zero at its end.
MAX_UDS_BYTES = 107
# gRPC reads unix:PATH as a URI: it decodes %41, and a client ends the path at the others.
URI_CHARACTERS = "%?#"
# More than any host or device has, and within 64 bits however it is multiplied by an element's size.
MAX_BYTES = 2**50
MAX_MS = 2**53
_LAYER_DIGITS = 10
# What Kubernetes tells a pod of a Service.
_SERVICE_LINK = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP)|PORT=(tcp|udp|sctp)://)")
_DESCRIPTION = """\
Serves the recurrent layers (Gated DeltaNet, Mamba2) of a language model, and holds their recurrent state, behind gRPC.
Give it a model directory as Hugging Face writes it:  deltaline-server --model ./Qwen3.5-4B --layers 0:3
Or random weights, to try it or to measure it:        deltaline-server --random-init config.json"""
_EPILOG = """\
Each option may come from the command line (--max-sequences 64), the environment (DELTALINE_MAX_SEQUENCES=64) or a
TOML file (max_sequences = 64; --config or DELTALINE_CONFIG names it), in this order. Bytes may be written as 4MiB."""


@dataclass(frozen=True)
class Config:
    """What the server is started with. Raises ConfigError when made with values that can't be used."""

    model: str | None = setting(
        None,
        "model",
        "model directory (config.json and *.safetensors), or org/name of a model in the Hugging Face cache",
        metavar="DIR|ORG/NAME",
    )
    random_init: str | None = setting(
        None, "model", "config.json of a model whose weights are drawn at random", metavar="PATH"
    )
    seed: int = setting(0, "model", "seed of the random weights", low=0, high=2**63 - 1)
    layers: str | None = setting(None, "model", "layers that may be served, FIRST:END (END not included); default all")
    spans: str | None = setting(
        None,
        "model",
        "what a step addresses, FIRST:END,FIRST:END,...; default one span of all layers (block), one per layer (mixer)",
    )
    scope: str = setting(
        "block", "model", "what a layer computes: the whole block, or its mixer", choices=("block", "mixer")
    )
    device: str = setting(
        "auto", "model", "where it computes; auto takes a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "model",
        "weights and hidden states; auto is the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    stream_ends: str = setting(
        "none",
        "model",
        "with residual streams, what is served beside layers: expand, before the first; head, behind the last",
        choices=("none", "expand", "head", "both"),
    )

    max_sequences: int = setting(256, "state", "sequences held at a time, and rows of a request", low=1, high=2**20)
    max_draft_tokens: int = setting(8, "state", "tokens of a VERIFY row, at most", low=1, high=32)
    state_dtype: str = setting("float32", "state", "recurrent state", choices=("float32", "bfloat16"))
    state_bytes: int = setting(
        0,
        "state",
        "cap of the state in bytes; what lines leave is for pages; more is refused; 0 for none",
        low=0,
        high=MAX_BYTES,
    )
    page_size: int = setting(64, "state", "tokens of a page of attention layers, a power of two", low=16, high=4096)
    max_context: int = setting(
        0,
        "state",
        "tokens of a sequence with attention layers, at most; 0 for as many as the model takes",
        low=0,
        high=2**31 - 1,
    )
    reply_bytes: int = setting(2**28, "state", "bytes of replies kept for retries, at most", low=1, high=MAX_BYTES)
    default_lease_ms: int = setting(
        600_000, "state", "lease of a sequence that asks for none, milliseconds", low=1, high=MAX_MS
    )
    max_lease_ms: int = setting(86_400_000, "state", "longest lease, milliseconds", low=1, high=MAX_MS)

    chunk_tokens: int = setting(
        2048, "batches", "tokens of long rows per batch, at most (prefill chunk)", low=64, high=2**24
    )
    batch_rows: int = setting(256, "batches", "short rows (decode, verify) per batch, at most", low=1, high=4096)
    queue_rows: int = setting(4096, "batches", "rows that may wait or run", low=1, high=2**31)
    queue_bytes: int = setting(2**28, "batches", "bytes of hidden states that may wait or run", low=1, high=MAX_BYTES)

    adapter_bytes: int = setting(
        0,
        "adapters",
        "bytes of host memory for adapters (LoRA, DoRA), at most, such as 1GiB; 0 for a server without them",
        low=0,
        high=MAX_BYTES,
    )
    adapter_root: str | None = setting(
        None, "adapters", "folder of adapters that clients may load by name; default none: they upload", metavar="DIR"
    )
    adapter_slots: int = setting(8, "adapters", "adapters on the device at a time", low=1, high=1024)
    max_adapter_rank: int = setting(64, "adapters", "largest rank of an adapter", low=1, high=256)

    host: str = setting("127.0.0.1", "network", "address to listen on, for steps and metrics")
    port: int = setting(50051, "network", "port of gRPC; 0 for any", low=0, high=65535)
    front_ends: int = setting(0, "network", "processes that speak gRPC; 0: this one does", low=0, high=64)
    uds: str | None = setting(None, "network", "listen on this Unix socket as well", metavar="PATH")
    link: str | None = setting(None, "network", local_socket.LINK, metavar="PATH")
    link_group: str | None = setting(None, "network", local_socket.GROUP, metavar="NAME")
    link_memory_bytes: int = setting(2**28, "network", local_socket.MEMORY, low=0, high=2**50)
    metrics_port: int = setting(
        9464, "network", "port of the Prometheus metrics; 0 for any, -1 for none", low=-1, high=65535
    )
    inline_limit_bytes: int = setting(2**22, "network", "bytes of a tensor in a message, at most", low=1024, high=2**30)
    shared_memory_bytes: int = setting(
        0,
        "network",
        "bytes of memory shared with clients of this user on this host, at most; 0 for none",
        low=0,
        high=MAX_BYTES,
    )

    drain_timeout_s: float = setting(
        30.0, "process", "how long open sequences are served after SIGTERM, seconds", low=0, high=10**9
    )
    threads: int = setting(0, "process", "CPU threads of the computation; 0 leaves it to PyTorch", low=0, high=4096)
    otlp_endpoint: str | None = setting(
        None,
        "process",
        "collector that traces are sent to, OTLP over gRPC, such as http://127.0.0.1:4317; default none: no traces",
        metavar="URL",
    )
    log_level: str = setting("info", "process", "least level that is logged", choices=LEVELS)
    log_format: str = setting("text", "process", "one event a line, for people or for collectors", choices=FORMATS)
    check: bool = setting(False, "process", "check the options and the model's files, then exit with 0 or 1")

    def __post_init__(self) -> None:
        """Check every value that can be checked without the model."""
        for option in fields(self):
            check_limits(option, getattr(self, option.name))
        if (self.model is None) == (self.random_init is None):
            got = "neither" if self.model is None else "both"
            raise ConfigError(f"--model, --random-init: expected one of them, got {got}")
        if self.default_lease_ms > self.max_lease_ms:
            raise ConfigError(f"--default-lease-ms: expected at most {self.max_lease_ms}, got {self.default_lease_ms}")
        if self.shared_memory_bytes and not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"--shared-memory-bytes: expected 0, as only Linux has it, got {self.shared_memory_bytes}"
            )
        if self.front_ends and not local_socket.has_link():
            raise ConfigError(f"--front-ends: expected 0, as only Linux has them, got {self.front_ends}")
        if self.adapter_root is not None and not self.adapter_bytes:
            raise ConfigError("--adapter-root: expected --adapter-bytes above 0 beside it, got 0")
        if self.adapter_root is not None and not Path(self.adapter_root).is_dir():
            raise ConfigError(f"--adapter-root: expected a folder that exists, got {self.adapter_root!r}")
        _check_host(self.host)
        if self.uds is not None:
            _check_uds(self.uds)
        try:
            local_socket.check(self.link, self.link_group)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint: expected http://HOST:PORT or https://..., got {self.otlp_endpoint!r}")
        if self.layers is not None:
            _range(self.layers, "--layers")
        for text in () if self.spans is None else self.spans.split(","):
            _range(text, "--spans")

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Read the options from arguments, environment and file.

        Raises ConfigError; SystemExit(0) after --help and --version.
        """
        file: dict[str, Any] | None = None
        try:
            flags = vars(_parser().parse_args(argv))
            path, file = flags.pop("config", environ.get(PREFIX + "CONFIG")), {}
            if path:
                file = _read_toml(path)
            return cls(**_values(flags, environ, _options_of(file, path)))
        except ConfigError as error:
            error.log_format = asked_log_format(argv, environ, file)
            raise

    @property
    def layer_range(self) -> range | None:
        """The layers that may be served, None for all."""
        return None if self.layers is None else _range(self.layers, "--layers")

    @property
    def span_ranges(self) -> tuple[range, ...] | None:
        """The declared spans, None for the default ones."""
        return None if self.spans is None else tuple(_range(text, "--spans") for text in self.spans.split(","))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables DELTALINE_* that are no option, such as misspelt ones.

    Not those that Kubernetes sets in every pod for a Service named deltaline or deltaline-*: DELTALINE_SERVICE_HOST,
    DELTALINE_PORT_50051_TCP.
    """
    known = {PREFIX + "CONFIG", *(PREFIX + option.name.upper() for option in fields(Config))}
    ours = (name for name in environ if name.startswith(PREFIX) and name not in known)
    return sorted(name for name in ours if not _SERVICE_LINK.match(f"{name}={environ[name]}"))


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
            asked = (_read_toml(known.config) if file is None else file).get("log_format")
    return asked if isinstance(asked, str) and asked in FORMATS else FORMATS[0]


def _values(flags: Mapping[str, str], environ: Mapping[str, str], file: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are given: a flag's before the environment's, and that before the file's. Raises ConfigError."""
    values = dict(file)
    for option in fields(Config):
        variable = PREFIX + option.name.upper()
        if variable in environ:
            values[option.name] = from_text(option, environ[variable], variable)
        if option.name in flags:
            values[option.name] = from_text(option, flags[option.name], flag(option.name))
    if values.get("model"):
        values["model"] = _model_directory(values["model"], environ)
    host, uds = values.get("host", Config.host), values.get("uds")
    return {"link": local_socket.default_folder(environ, host, uds)} | values


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
        if kind_of(option) is bool:
            group.add_argument(flag(option.name), action="store_const", const="true", help=metadata["text"])
        else:
            metavar = "|".join(metadata["choices"]) or (metadata["metavar"] if kind_of(option) is str else "N")
            group.add_argument(flag(option.name), metavar=metavar, help=metadata["text"] + shown(option))
    return parser


def _model_directory(model: str, environ: Mapping[str, str]) -> str:
    """The directory of a model: its own, or of a name on the Hugging Face hub what the cache on this host holds."""
    check_path("--model", model)
    if Path(model).is_dir() or not HUB_NAME.fullmatch(model):
        return model
    try:
        return str(cached_model(model, environ))
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error


def _options_of(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The options of a TOML file; unknown keys and values of a wrong type are refused by name."""
    options = {option.name: option for option in fields(Config)}
    unknown = [key if key.isidentifier() else errors.shown(key) for key in sorted(values.keys() - options.keys())]
    if unknown:
        raise ConfigError(f"{path}: unknown option {', '.join(unknown)}")
    return {name: from_toml(options[name], value, f"{path}: {name}") for name, value in values.items()}


def _read_toml(path: str) -> dict[str, Any]:
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


def _check_uds(path: str) -> None:
    """A socket may be made at the path, as far as its length, its characters and its folder tell."""
    if not 0 < len(os.fsencode(path)) <= MAX_UDS_BYTES:
        raise ConfigError(f"--uds: expected a path of 1 .. {MAX_UDS_BYTES} bytes, got {errors.shown(path)}")
    if any(character in path for character in URI_CHARACTERS):
        raise ConfigError(f"--uds: expected a path without {' '.join(URI_CHARACTERS)}, got {path!r}")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--uds: expected a socket in a folder that exists, got {path!r}")


def _check_host(host: str) -> None:
    """A name or an address, as far as its form tells."""
    try:
        is_host = host.isprintable() and not any(map(str.isspace, host)) and len(host.encode("idna")) > 0
    except UnicodeError:
        is_host = False
    if not is_host:
        raise ConfigError(f"--host: expected the name of a host, or its address, got {errors.shown(host)}")


def _range(text: str, flag: str) -> range:
    """FIRST:END as a range."""
    first, _, end = text.partition(":")
    are_numbers = all(part.isdecimal() and len(part) <= _LAYER_DIGITS for part in (first, end))
    if not (are_numbers and int(first) < int(end) <= 2**31):
        raise ConfigError(f"{flag}: expected FIRST:END with FIRST < END, got {errors.shown(text)}")
    return range(int(first), int(end))
