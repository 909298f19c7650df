"""A Prometheus of a test's own: scrapes one server every second with the rules of deploy/prometheus, and is asked for
what it knows. Needs the program; skips the test where it is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from rigs.routers import free_port

from deltaline_server.app import Server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
PATIENCE_S = 100.0
_MISSING = "{} is not installed; Debian's package prometheus has it"


def program(name: str) -> str:
    """The path of prometheus or promtool."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(_MISSING.format(name))
    return found


def scrape(server: Server) -> str:
    """The page of a server's metrics. Not to be called on its event loop."""
    with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=30) as answer:
        return str(answer.read(), encoding="utf-8")


class Prometheus:
    """A running Prometheus, by its address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """What its API answers as data. Raises URLError, also for a query that it refuses."""
        with urlopen(f"http://{self._address}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def values(self, expression: str) -> list[float]:
        """The values of a query now, one for each series."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]

    def wait_for(self, expression: str, least: float) -> None:
        """Return once a query has a value of at least so much."""
        missing = [f"{expression}: expected {least} within {PATIENCE_S:g} s"]
        missing = self.ask_until_none(lambda _: [] if any(v >= least for v in self.values(expression)) else missing)
        assert missing == []

    def ask_until_none(self, what_is_missing: Callable[[Prometheus], list[str]]) -> list[str]:
        """Ask again and again what is missing; return the last answer, which is empty unless it took too long."""
        until_s = time.monotonic() + PATIENCE_S
        missing = ["an answer"]
        while missing and time.monotonic() < until_s:
            time.sleep(0.2)
            with suppress(URLError):  # it starts
                missing = what_is_missing(self)
        return missing


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Run the Prometheus of deploy/prometheus with this target; it keeps its data in the folder."""
    binary = program("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Prometheus(address)
        finally:
            process.kill()
            process.wait()
