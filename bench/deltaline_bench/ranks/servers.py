"""Servers over ranks as processes, which may be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

_BASE = ("--port", "0", "--metrics-port", "-1", "--link", "off", "--log-format", "json")


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """A server that is started at once, waited for by `wait_until_ready`, and killed at the end.

    Attributes: process; once it is ready address, ready_s (seconds since its start) and ranks (their processes, in
    their order).
    """

    def __init__(self, config: Path, world_size: int, *options: str) -> None:
        """config: whose weights are drawn."""
        command = [sys.executable, "-m", "deltaline_server", "--random-init", str(config), *_BASE]
        command += ["--tensor-parallel", str(world_size), *options]
        self._begin_s = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> Self:
        """Raises RuntimeError, with what it said last, where the server ends instead."""
        assert self.process.stderr is not None
        said: dict[str, Any] = {}
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            said = json.loads(line) if line.startswith("{") else {}
            if said.get("message") == "ready":
                break
        if said.get("message") != "ready":
            raise RuntimeError("no server: " + "".join(lines)[-2000:])
        self.ready_s, self.address = time.monotonic() - self._begin_s, str(said["address"])
        # What it says from now on nobody reads, and must not fill its pipe.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        pid = self.process.pid
        self.ranks = sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
