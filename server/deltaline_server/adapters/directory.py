"""An adapter's directory: what it may be called, and its two files. Imports no torch, for those who answer clients."""

from __future__ import annotations

import re

from deltaline_server.checkpoints.config_reader import ModelError

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> None:
    """Raise ModelError unless an adapter may have this name."""
    if not NAME.fullmatch(name):
        raise ModelError("name: expected 1 .. 64 of A-Z a-z 0-9 . _ - and no dot at its beginning")
