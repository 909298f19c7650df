"""What every record of a program begins with: how it was made, when, and with what."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from types import ModuleType
from typing import Any


def provenance(device: str, *modules: ModuleType) -> dict[str, Any]:
    """The command, the date, the device and the versions of the modules that the figures depend on."""
    versions = {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}
    return {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "versions": versions,
    }
