"""Log lines: one event per line, as text for people or JSON for collectors.

Nobody hands it tensors, handles or request bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_FIELDS = "fields"
# What gRPC raises when a client has left, in its own handlers and through ours.
_CLIENT_LEFT = "ExecuteBatchError"
# Who says that a header is no UTF-8, with the whole header, at each reading.
_CYGRPC = "grpc._cython.cygrpc"


def event(logger: logging.Logger, message: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Log one event with named values, for example event(log, "drain began", timeout_s=30)."""
    logger.log(level, message, extra={_FIELDS: fields})


class Progress:
    """How far some work is, told from any thread: its stage, how many of the stage's parts are done, and what stages
    took, by their names. One ends where the next begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage, self._begin_s = "", 0.0
        self.done = self.total = 0
        self.seconds: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """Begin a stage, none of whose parts is done."""
        self.end()
        self._stage, self._begin_s, self.done, self.total = stage, self._clock(), 0, 0

    def end(self) -> None:
        """End the stage, if there is one."""
        if self._stage:
            self.seconds[self._stage] = self._clock() - self._begin_s
        self._stage = ""

    def report(self, done: int, total: int) -> None:
        """Tell how many of the stage's parts are done, of how many."""
        self.done, self.total = done, total

    @property
    def fields(self) -> dict[str, Any]:
        """What a line says of it: the stage, how far that is, and how long it will take if it goes on like this."""
        fields: dict[str, Any] = {"stage": self._stage} if self._stage else {}
        done, total = self.done, self.total
        if total:
            fields["done"] = f"{done} of {total}"
        if done:
            fields["left_s"] = round((self._clock() - self._begin_s) * (total - done) / done)
        return fields


async def told(
    work: Coroutine[Any, Any, T],
    logger: logging.Logger,
    message: str,
    progress: Progress | None = None,
    every_s: float = 5.0,
) -> T:
    """What some work returns; how long it takes and how far it is are logged while it goes on."""
    begin_s, working = time.monotonic(), asyncio.create_task(work)
    while not (await asyncio.wait([working], timeout=every_s))[0]:
        far = {} if progress is None else progress.fields
        event(logger, message, seconds=round(time.monotonic() - begin_s), **far)
    return working.result()


def configure(level: str, format: str) -> None:
    """Send the logs of the process to standard error, in one of FORMATS, from one of LEVELS up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(_is_news)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line: gRPC's traceback of a client that left while it was answered is not, nor that
    of a header that is no UTF-8, which may be a token."""
    error = None if record.exc_info is None else record.exc_info[0]
    if error is UnicodeDecodeError and record.name == _CYGRPC:
        return False
    return getattr(error, "__name__", "") != _CLIENT_LEFT


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO message  name=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        values = {**getattr(record, _FIELDS, {}), **_trace_ids()}
        fields = "".join(f" {name}={_text(value)}" for name, value in values.items())
        line = f"{_time(record)} {record.levelname} {record.getMessage()}{fields and ' ' + fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the event's values, its trace, and an error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
            **_trace_ids(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _trace_ids() -> dict[str, str]:
    """The span that is current where a line is logged; nothing where there is none, or nobody makes traces."""
    api: Any = sys.modules.get("opentelemetry.trace")
    context = None if api is None else api.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _time(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _text(value: object) -> str:
    """A value that can neither end its line nor tell a terminal anything, quoted where it has spaces."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return (
        json.dumps(text) if text == "" or any(c.isspace() or c in '"=' or not c.isprintable() for c in text) else text
    )
