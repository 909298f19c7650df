"""The audit: who opened, loaded, drained and was refused, a JSON line each in a file of its own.

Apart from the log, as others read it and keep it for longer, and what fills the log must not push it out. Nobody hands
it tensors, tokens or handles.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from io import FileIO, TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Any, BinaryIO, cast

from deltaline_server.log import JsonFormatter, event

# Lines of a principal a second, of one kind: of what it did, and of refusals. The next line says how many had none.
DONE_PER_S = 100
REFUSALS_PER_S = 10
# How often the log has a line when lines of the audit can't be written.
TELL_LOST_S = 60.0

_log = logging.getLogger(__name__)


class AuditError(RuntimeError):
    """The audit's file can't be written; the message is one line for the operator."""


def open_audit(path: str | None, clock: Callable[[], float]) -> Audit | None:
    """The audit in a file, None for none. clock: monotonic seconds. Raises AuditError."""
    if path is None:
        return None
    try:
        return Audit(path, clock)
    except OSError as error:
        raise AuditError(f"--audit-log: can't write {path} ({error.strerror})") from error


class Audit:
    """Writes to a file, which is made with mode 0600, and made again when it was moved."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds. Raises OSError."""
        self._file = _File(path, clock)
        self._file.setFormatter(JsonFormatter())
        self._logger = logging.Logger("audit")
        self._logger.addHandler(self._file)
        self._clock = clock
        self._rates: dict[tuple[str, str], _Rate] = {}

    def done(self, what: str, principal: str, client: str, **values: Any) -> None:
        """Write that a principal's call did something, by a word: "opened"; unless it did very often in this second."""
        self._write(what, principal, DONE_PER_S, client=client, **values)

    def refused(self, method: str, principal: str, client: str, reason: str) -> None:
        """Write that a principal's call was refused, unless many of its were in this second."""
        self._write("refused", principal, REFUSALS_PER_S, client=client, method=method, reason=reason)

    def _write(self, what: str, principal: str, per_s: int, **values: Any) -> None:
        rate = self._rates.setdefault((what, principal), _Rate())
        second = int(self._clock())
        if rate.second != second:
            rate.second, rate.count = second, 0
        rate.count += 1
        if rate.count > per_s:
            rate.left_out += 1
            return
        left_out, rate.left_out = rate.left_out, 0
        told = {"left_out": left_out} if left_out else {}
        event(self._logger, what, principal=principal, **values, **told)

    def close(self) -> None:
        """Write what was left out last, and close the file."""
        for (what, principal), rate in self._rates.items():
            if rate.left_out:
                event(self._logger, what, principal=principal, left_out=rate.left_out)
        self._file.close()


class _Rate:
    """Of a principal and a kind: how many in the second, and how many without a line since the last that had one."""

    second = count = left_out = 0


class _File(WatchedFileHandler):
    """num_lost: lines that could not be written."""

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._clock, self._told_s, self.num_lost = clock, -math.inf, 0
        super().__init__(path, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        # Without buffers: of what could not be written nothing is kept.
        file = FileIO(self.baseFilename, "ab", opener=partial(os.open, mode=0o600))
        return TextIOWrapper(cast("BinaryIO", file), encoding="utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk holds up no call, and does not fill the log."""
        self.num_lost += 1
        if self._clock() >= self._told_s + TELL_LOST_S:
            self._told_s = self._clock()
            event(_log, "lines of the audit are lost", level=logging.ERROR, lost=self.num_lost)
