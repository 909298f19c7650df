"""Whether tensors that should go through shared memory went in messages: the client falls back, and only logs it."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

_LOGGER = "deltaline_client"


class InlineNotes(logging.Handler):
    """Keeps what the client logs about shared memory within the block: all of it is about tensors that go inline."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's text if it is about shared memory."""
        text = record.getMessage()
        if "shared memory" in text:
            self.texts.append(text)

    def __enter__(self) -> Self:
        logger = logging.getLogger(_LOGGER)
        self._level_before = logger.level
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
        logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logger = logging.getLogger(_LOGGER)
        logger.removeHandler(self)
        logger.setLevel(self._level_before)
