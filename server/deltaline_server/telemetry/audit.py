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

# Refusals of a principal that have a line, a second; the next line says how many had none.
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
        self._refusals: dict[str, _Refusals] = {}

    def done(self, what: str, principal: str, client: str, **values: Any) -> None:
        """Write that a principal's call did something, by a word: "opened"."""
        event(self._logger, what, principal=principal, client=client, **values)

    def refused(self, method: str, principal: str, client: str, reason: str) -> None:
        """Write that a principal's call was refused, unless many of its were in this second."""
        refusals = self._refusals.setdefault(principal, _Refusals())
        second = int(self._clock())
        if refusals.second != second:
            refusals.second, refusals.count = second, 0
        refusals.count += 1
        if refusals.count > REFUSALS_PER_S:
            refusals.left_out += 1
            return
        left_out, refusals.left_out = refusals.left_out, 0
        values: dict[str, Any] = {"left_out": left_out} if left_out else {}
        event(self._logger, "refused", principal=principal, client=client, method=method, reason=reason, **values)

    def close(self) -> None:
        """Write what was left out last, and close the file."""
        for principal, refusals in self._refusals.items():
            if refusals.left_out:
                event(self._logger, "refused", principal=principal, left_out=refusals.left_out)
        self._file.close()


class _Refusals:
    """Of a principal: how many in the second, and how many without a line since the last that had one."""

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
