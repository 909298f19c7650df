"""The collector that traces go to, where one is configured: begins and ends what sends them (tracing.py).

OpenTelemetry may not be installed: nothing of it is imported unless it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from deltaline_server.config import Config, ConfigError

if TYPE_CHECKING:
    from deltaline_server.telemetry.tracing import Tracing


def begin_tracing(config: Config, clock: Callable[[], float]) -> Tracing | None:
    """Return what makes the spans of a server, None where no collector is configured. Raises: ConfigError."""
    if config.otlp_endpoint is None:
        return None
    try:
        from deltaline_server.telemetry.tracing import Tracing

        return Tracing.to_collector(config.otlp_endpoint, clock)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--otlp-endpoint: {error.name} is missing: pip install 'deltaline[otel]'") from error
    except Exception as error:  # ValueError when it is imported or begins, OSError of a certificate, kinds of its own
        raise ConfigError(f"--otlp-endpoint: OpenTelemetry refuses its settings (OTEL_*): {error}") from error


async def end_tracing(tracing: Tracing | None) -> None:
    """Send what is not sent yet. Idempotent."""
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
