"""The configuration: all options together, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from deltaline_server import local_socket
from deltaline_server.config import sources
from deltaline_server.config.adapters import AdapterOptions
from deltaline_server.config.batches import BatchOptions
from deltaline_server.config.hub import fetch_model
from deltaline_server.config.model import ModelOptions
from deltaline_server.config.option import ConfigError, check_path
from deltaline_server.config.paths import HUB_NAME, cached_model, hub_cache
from deltaline_server.config.process import ProcessOptions
from deltaline_server.config.state import StateOptions
from deltaline_server.config.trust import TrustOptions

# What the command `deltaline` reads, which may run beside the server.
_COMMAND = ("TLS_CA", "TLS_NAME")
# What Kubernetes tells a pod of a Service.
_SERVICE_LINK = re.compile(
    rf"{sources.PREFIX}(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP)|PORT=(tcp|udp|sctp)://)"
)


# Fields and checks come in the order from the last of them to the first.
@dataclass(frozen=True)
class Config(ProcessOptions, TrustOptions, AdapterOptions, BatchOptions, StateOptions, ModelOptions):
    """What the server is started with. Raises ConfigError when made with values that can't be used."""

    def __post_init__(self) -> None:
        """Check that what may be moved has memory to go by."""
        super().__post_init__()
        if self.move_peers is not None and not self.host_state_bytes:
            raise ConfigError("--move-peers: expected --host-state-bytes above 0 beside it, by which moves go, got 0")

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """Read the options from arguments, environment and file.

        Raises ConfigError; SystemExit(0) after --help and --version.
        """
        options = fields(cls)
        file: dict[str, Any] | None = None
        try:
            flags = sources.flags_of(options, argv)
            path, file = flags.pop("config", environ.get(sources.PREFIX + "CONFIG")), {}
            if path:
                file = sources.read_toml(path)
            values = sources.values_of(options, flags, environ, sources.options_of(options, file, path))
            if values.get("model"):
                values["model"] = _model_directory(values["model"], environ)
            link = local_socket.default_folder(environ, values.get("host", cls.host), values.get("uds"))
            return cls(**{"link": link} | values)
        except ConfigError as error:
            error.log_format = sources.asked_log_format(argv, environ, file)
            raise


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables DELTALINE_* that are no option, such as misspelt ones.

    Not those that Kubernetes sets in every pod for a Service named deltaline or deltaline-*: DELTALINE_SERVICE_HOST,
    DELTALINE_PORT_50051_TCP.
    """
    known = {sources.PREFIX + name for name in ("CONFIG", *_COMMAND, *(each.name.upper() for each in fields(Config)))}
    ours = (name for name in environ if name.startswith(sources.PREFIX) and name not in known)
    return sorted(name for name in ours if not _SERVICE_LINK.match(f"{name}={environ[name]}"))


def _model_directory(model: str, environ: Mapping[str, str]) -> str:
    """The directory of a model: its own, or of a name on the Hugging Face hub the one in the cache of this host, into
    which it is brought where it is not there."""
    check_path("--model", model)
    if Path(model).is_dir() or not HUB_NAME.fullmatch(model):
        return model
    try:
        return str(cached_model(model, environ))
    except ValueError as error:
        if why := fetch_model(model, hub_cache(environ), environ):
            raise ConfigError(f"--model: {error}; {why}") from error
    try:
        return str(cached_model(model, environ))
    except ValueError as error:
        raise ConfigError(f"--model: {error}; the hub has no more of it") from error
