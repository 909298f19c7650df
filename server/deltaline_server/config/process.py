"""Options about the process: how it ends, its threads, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_server.config.option import ConfigError, Options, setting
from deltaline_server.log import FORMATS, LEVELS


@dataclass(frozen=True)
class ProcessOptions(Options):
    """How the process ends, and what it tells of itself."""

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
    audit_log: str | None = setting(
        None,
        "process",
        "file that gets a JSON line for each call that opened, loaded, drained or was refused; default none",
        metavar="PATH",
    )
    check: bool = setting(False, "process", "check the options and the model's files, then exit with 0 or 1")

    def __post_init__(self) -> None:
        """Check the form of the collector's address."""
        super().__post_init__()
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint: expected http://HOST:PORT or https://..., got {self.otlp_endpoint!r}")
