"""Options about what the server holds: sequences, their state, replies and leases."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_server.config.option import MAX_BYTES, ConfigError, Options, setting

MAX_MS = 2**53


@dataclass(frozen=True)
class StateOptions(Options):
    """What is held of sequences, and how much of it."""

    max_sequences: int = setting(256, "state", "sequences held at a time, and rows of a request", low=1, high=2**20)
    snapshot_lines: int = setting(
        -1,
        "state",
        "lines of state that snapshots and forks take beside those of sequences; -1 for a quarter of these",
        low=-1,
        high=2**20,
    )
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
    host_state_bytes: int = setting(
        0, "state", "pinned host memory for stored states, at most, such as 8GiB; 0 for none", low=0, high=MAX_BYTES
    )
    state_dir: str | None = setting(
        None,
        "state",
        "folder of this server alone for files of stored states, made with mode 0700; they are not encrypted; default "
        "none: no files",
        metavar="DIR",
    )
    state_dir_bytes: int = setting(
        0, "state", "bytes of its files, at most; those used least recently make way", low=0, high=MAX_BYTES
    )
    reply_bytes: int = setting(2**28, "state", "bytes of replies kept for retries, at most", low=1, high=MAX_BYTES)
    default_lease_ms: int = setting(
        600_000, "state", "lease of a sequence that asks for none, milliseconds", low=1, high=MAX_MS
    )
    max_lease_ms: int = setting(86_400_000, "state", "longest lease, milliseconds", low=1, high=MAX_MS)

    def snapshot_lines_beside(self, num_sequences: int) -> int:
        """Lines of snapshots beside those of so many sequences: as many as were asked for, or a quarter."""
        return -(-num_sequences // 4) if self.snapshot_lines == -1 else self.snapshot_lines

    def __post_init__(self) -> None:
        """Check that the default lease may be had, and that a folder of states comes with its bound."""
        super().__post_init__()
        if self.state_dir is not None and not self.state_dir_bytes:
            raise ConfigError("--state-dir: expected --state-dir-bytes above 0 beside it, got 0")
        if self.state_dir is not None and not self.host_state_bytes:
            raise ConfigError("--state-dir: expected --host-state-bytes above 0 beside it, by which files go, got 0")
        if self.state_dir_bytes and self.state_dir is None:
            raise ConfigError(f"--state-dir-bytes: expected --state-dir beside it, got {self.state_dir_bytes} alone")
        if self.default_lease_ms > self.max_lease_ms:
            raise ConfigError(f"--default-lease-ms: expected at most {self.max_lease_ms}, got {self.default_lease_ms}")
