"""The share of a bench's time in which the device computed, from the server's metrics page."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from deltaline_client import Tls

BUSY = "deltaline_device_busy_seconds_total"
"""What a server counts the device's busy seconds in."""

_COMPUTE = re.compile(r'deltaline_stage_seconds_sum\{(?=.*stage="compute").*kind="(\w+)".*\}')
_TIMEOUT_S = 5.0
# A server's page is some 100 KiB; what has no end is not one.
_MOST_BYTES = 16 << 20
_MOST_REASON_BYTES = 200


def read_metrics(url: str, tls: Tls | None = None) -> dict[str, float]:
    """Return the samples of a Prometheus page by name with labels. tls: of https://. Raises OSError, also where the
    other side does not speak HTTP, as a gRPC port; ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--metrics-url: expected http://HOST:PORT/metrics, got {url!r}")
    try:
        with urlopen(url, timeout=_TIMEOUT_S, context=None if tls is None else tls.context()) as answer:
            page, end_s = bytearray(), time.monotonic() + _TIMEOUT_S
            while piece := answer.read1(_MOST_BYTES):
                page += piece
                if len(page) > _MOST_BYTES or time.monotonic() > end_s:
                    raise ValueError(f"expected a page of metrics, got {len(page)} bytes and no end of them")
            if answer.length:
                raise OSError(f"the page ended {answer.length} bytes too early")
    except HTTPError as error:
        is_text = error.headers.get_content_type() == "text/plain"
        said = error.read(_MOST_REASON_BYTES).decode(errors="replace").partition("\n")[0] if is_text else ""
        raise OSError(f"{error}{said and f': {said}'}") from error
    except HTTPException as error:
        raise OSError(f"no answer in HTTP: {error!r}") from error
    except OverflowError as error:  # of a port above 65,535
        raise OSError(str(error)) from error
    text = str(page, encoding="utf-8")
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def busy_seconds(before: Mapping[str, float], after: Mapping[str, float]) -> float | str:
    """Return the device's busy seconds between two pages, or why they are not known.

    A server without such a counter has the computing time of batches by kind. A batch of several kinds counts for
    each, so that their sum is only right when a single kind was computed.
    """
    if BUSY in before and BUSY in after:
        return after[BUSY] - before[BUSY]
    spent = {name: after[name] - before.get(name, 0.0) for name in after if _COMPUTE.fullmatch(name)}
    grown = [seconds for seconds in spent.values() if seconds > 0]
    if len(grown) > 1:
        return f"the server has no {BUSY}, and its batches of several kinds count more than once"
    return grown[0] if grown else "the server's metrics tell of no computation"


class BusyMeter(threading.Thread):
    """Reads the metrics when the measuring begins and when it ends; `share` is what came of it."""

    def __init__(self, url: str, begin_s: float, end_s: float | None, tls: Tls | None = None) -> None:
        super().__init__(name="busy", daemon=True)
        self._url, self._begin_s, self._end_s, self._tls = url, begin_s, end_s, tls
        self._finished = threading.Event()
        self._share: float | str = "the run was over before the metrics were read"

    def run(self) -> None:
        """Wait for both times, and compare."""
        try:
            if self._finished.wait(max(0.0, self._begin_s - time.monotonic())):
                return
            from_s, before = time.monotonic(), read_metrics(self._url, self._tls)
            self._finished.wait(None if self._end_s is None else max(0.0, self._end_s - time.monotonic()))
            to_s, after = time.monotonic(), read_metrics(self._url, self._tls)
        except (URLError, OSError, ValueError) as error:
            self._share = f"no metrics: {error}"
            return
        seconds = busy_seconds(before, after)
        # A batch counts when it is over: one that began before would make it more than all of the time.
        self._share = seconds if isinstance(seconds, str) else min(1.0, seconds / (to_s - from_s))

    def share(self) -> float | str:
        """Return the share, 0 .. 1, or why there is none; the run is over."""
        self._finished.set()
        self.join()
        return self._share
