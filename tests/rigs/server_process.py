"""A server as a process of its own, which a test may kill: its log, and its front ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from rigs.small_models import GATED_DELTA_NET
from rigs.until import until


class ServerProcess:
    """A server of the small model, on the CPU: `async with ServerProcess(directory, "--front-ends", "2") as server`
    waits until it is ready, and kills it at the end. events: its log, as far as it is read; options on the command line
    come last."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        config: Mapping[str, Any] = GATED_DELTA_NET,
        command: Sequence[str] = ("-m", "deltaline_server"),
    ) -> None:
        """config: the model's. command: what Python is given before the options."""
        model = directory / "config.json"
        model.write_text(json.dumps(config))
        own = ("--random-init", str(model), "--seed", "7", "--device", "cpu", "--dtype", "float32", "--link", "off")
        ports = ("--port", "0", "--metrics-port", "-1", "--log-format", "json")
        self._command = [sys.executable, *command, *own, *ports, *options]
        self.events: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220 - at once
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        await until(lambda: self.said("ready") or self._process.poll() is not None)
        assert self.said("ready"), self.events
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.startswith("{"):  # torchrun has words of its own
                    self.events.append(json.loads(line))

    def said(self, message: str) -> list[dict[str, Any]]:
        """The log's lines with a message."""
        return [event for event in list(self.events) if event["message"] == message]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        return str(self.said("ready")[0]["address"])

    def count(self, sample: str) -> float:
        """The number behind the name and labels of a metric; 0 where there is none yet."""
        with urlopen(f"http://127.0.0.1:{self.said('ready')[0]['metrics_port']}/metrics") as page:
            lines = page.read().decode().splitlines()
        return next((float(line.removeprefix(sample)) for line in lines if line.startswith(sample)), 0.0)

    @property
    def front_ends(self) -> list[int]:
        """The front ends that serve."""
        return [pid for event in self.said("front end serves") if is_alive(pid := event["pid"])]

    def kill(self) -> None:
        """Kill the core, and wait for its end."""
        self._process.kill()
        self._process.wait()


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own_bytes(pid: int, name: str = "VmRSS") -> int:
    """Memory of a process, as /proc says it; of one that is over, 0."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:")), 0)
