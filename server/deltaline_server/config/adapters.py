"""Options about adapters: how many, how large, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltaline_server.config.option import MAX_BYTES, ConfigError, Options, setting


@dataclass(frozen=True)
class AdapterOptions(Options):
    """The adapters that clients may load."""

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

    def __post_init__(self) -> None:
        """Check that their folder is there, and memory for them."""
        super().__post_init__()
        if self.adapter_root is not None and not self.adapter_bytes:
            raise ConfigError("--adapter-root: expected --adapter-bytes above 0 beside it, got 0")
        if self.adapter_root is not None and not Path(self.adapter_root).is_dir():
            raise ConfigError(f"--adapter-root: expected a folder that exists, got {self.adapter_root!r}")
