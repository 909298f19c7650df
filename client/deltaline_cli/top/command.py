"""`deltaline top`: a server's load, latencies, lines and adapters in a terminal, again and again.

Knows when to ask what; not how it looks (view.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import replace
from typing import Any

from deltaline_cli.address import tls_of, token_of
from deltaline_cli.bench.busy import read_metrics
from deltaline_cli.top.frame import Frame, Rates, Samples
from deltaline_client import Client, DeltalineError, Retry, Tls

_ABOUT = """\
Shows what a server is doing: sequences, state lines, pages, queue and kept replies against their limits, and its
adapters. With --metrics-url also what each stage of a step takes, by kind of row (median and 99th percentile since the
last frame), how busy the device is, batches, retries and refusals. In a terminal it goes on until Ctrl-C; elsewhere
each frame is printed after the other.

  deltaline top                                                  the server on this machine
  deltaline top HOST:50051 --metrics-url http://HOST:9464/metrics
  deltaline top --once                                           one frame, for scripts
"""
_TIMEOUT_S = 5.0
_MOST_S = 86_400.0


def add_top(commands: Any, served: argparse.ArgumentParser) -> None:
    """Add `top` to the commands of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    about = "watch a server in the terminal"
    parser = commands.add_parser("top", parents=[served], help=about, description=_ABOUT, formatter_class=raw)
    parser.set_defaults(run=top)
    text = "the server's metrics (http://HOST:9464/metrics), for latencies and rates"
    parser.add_argument("--metrics-url", metavar="URL", help=text)
    text = "seconds between frames, and that rates are of [%(default)s]"
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help=text)
    text = "print one frame and exit; with --metrics-url after one interval, with 1 if that has no metrics"
    parser.add_argument("--once", action="store_true", help=text)


def top(options: argparse.Namespace) -> int:
    """Show frames until interrupted, or one; 0, or 1 where the one lacks the rates that were asked for.

    Raises ValueError, and DeltalineError where the first frame fails.
    """
    if not 0 < options.interval <= _MOST_S:
        raise ValueError(f"--interval: expected a positive number of seconds, a day at most, got {options.interval:g}")
    if importlib.util.find_spec("rich") is None:
        raise ValueError("top needs rich: pip install 'deltaline[top]'")
    from rich.console import Console  # an extra of its own: programs that use the client have no need for it
    from rich.live import Live

    from deltaline_cli.top.view import render

    console = Console()
    tls = tls_of(options)
    with Client(
        options.server, timeout=_TIMEOUT_S, retry=Retry(max_attempts=1), tls=tls, **token_of(options)
    ) as client:
        watch = Watch(client, options.server, options.metrics_url, tls)
        frame = watch.frame()
        if options.metrics_url is not None:
            time.sleep(options.interval if options.once else min(options.interval, 1.0))
            frame = watch.frame()
        if options.once:
            console.print(render(frame, console.width))
            return int(isinstance(frame.rates, str))
        if not console.is_terminal:
            while True:
                console.print(render(frame, console.width))
                sys.stdout.flush()
                time.sleep(options.interval)
                frame = watch.frame(last=frame)
        with Live(render(frame, console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(render(frame, console.width), refresh=True)
                time.sleep(options.interval)
                frame = watch.frame(last=frame)


class Watch:
    """Asks a server for frames, and remembers what rates need."""

    def __init__(self, client: Client, address: str, metrics_url: str | None, tls: Tls | None = None) -> None:
        self._client, self._address, self._url, self._tls = client, address, metrics_url, tls
        self._read: tuple[float, Samples] | None = None

    def frame(self, last: Frame | None = None) -> Frame:
        """Ask for everything now. last: what to show again where the server can't be asked; without it this raises
        DeltalineError."""
        rates = self._rates()
        try:
            info = self._client.info(refresh=True)
            adapters = self._client.adapters.list() if info.adapter_bytes else None
            return Frame(self._address, info, self._client.load(), adapters, rates)
        except DeltalineError as error:
            if last is None:
                raise
            return replace(last, rates=rates, error=f"can't be asked: {error}")

    def _rates(self) -> Rates | str | None:
        """What grew since the last call, why that is not known, or None where no metrics are read."""
        if self._url is None:
            return None
        try:
            now = time.monotonic(), read_metrics(self._url, self._tls)
        except (OSError, ValueError) as error:
            self._read = None
            if isinstance(error, ValueError) and str(error).startswith("--metrics-url"):
                raise
            return f"no latencies and rates: {self._url}: {error}"
        before, self._read = self._read, now
        if before is None:
            return "latencies and rates come with the next frame"
        return Rates(before[1], now[1], now[0] - before[0])
