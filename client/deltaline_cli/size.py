"""`deltaline size`: hands its arguments to the server's own calculator, a process of its own.

What a server allocates is the server's to know, and it needs torch: nothing here imports it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from deltaline_cli.demo import missing_packages

_MODULE = "deltaline_server.sizing"


def size(arguments: Sequence[str]) -> int:
    """Run the calculator; return its exit code. Raises ValueError where the server is not installed."""
    missing = missing_packages()
    if missing:
        raise ValueError(f"size needs {', '.join(missing)}: pip install 'deltaline[server]'")
    return subprocess.run([sys.executable, "-m", _MODULE, *arguments], check=False).returncode
