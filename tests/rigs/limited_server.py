"""A server as a process of its own, which may open few files; its log is JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rigs.small_models import GATED_DELTA_NET


class Limited(NamedTuple):
    """A server's address, that of its metrics, and the file of its standard error."""

    address: str
    metrics_port: int
    log: Path
    pid: int

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged: JSON, every line."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def limited(tmp_path: Path, front_ends: int = 0, num_files: int = 256) -> Iterator[Limited]:
    """Start one on the CPU, without a link, which its clients would go by. num_files: that it may open."""
    model, log = tmp_path / "config.json", tmp_path / "log"
    model.write_text(json.dumps(GATED_DELTA_NET))
    command = [sys.executable, "-m", "deltaline_server", "--random-init", str(model), "--device", "cpu", "--port", "0"]
    command += ["--metrics-port", "0", "--link", "off", "--log-format", "json", "--front-ends", str(front_ends)]
    shell = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh"]
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with (
        log.open("w") as errors,
        subprocess.Popen([*shell, *command], stderr=errors, env=environ) as core,
    ):
        try:
            while not (ready := [line for line in log.read_text().splitlines() if '"ready"' in line]):
                assert core.poll() is None, log.read_text()
            told = json.loads(ready[0])
            yield Limited(told["address"], told["metrics_port"], log, core.pid)
        finally:
            core.kill()
