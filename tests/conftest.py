"""What every test shares: the devices, checkpoints written by transformers, and which tests this machine runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the exhaustive sweeps too")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}
    logging.getLogger("asyncio").addFilter(_is_of_a_test)


def _is_of_a_test(record: logging.LogRecord) -> bool:
    """Whether a record isn't gRPC's about a call of an earlier test, whose loop is closed. pytest keeps records; the
    traceback in that one has frames of whatever test it came into, and what a test looks for may live on in them."""
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out sweeps unless asked for, tests marked `gpu` on a machine without a CUDA device, and among parallel
    workers those marked `alone`."""
    reasons = {item: reason for item in items if (reason := _why_left_out(item))}
    if reasons:
        config.hook.pytest_deselected(items=list(reasons))
        items[:] = [item for item in items if item not in reasons]
    config.stash[LEFT_OUT] = dict(Counter(reasons.values()))
    if hasattr(config, "workeroutput"):  # of pytest-xdist: what a worker tells at its end
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]


def _why_left_out(item: pytest.Item) -> str:
    if item.get_closest_marker("sweep") and not item.config.getoption("--all"):
        return "are exhaustive sweeps: --all runs them"
    if item.get_closest_marker("gpu") and not _has_cuda():
        return "need a CUDA device; torch finds none"
    if item.get_closest_marker("alone") and hasattr(item.config, "workerinput"):
        return "measure time, which other workers take: -m alone runs them by themselves"
    return ""


@cache
def _has_cuda() -> bool:
    import torch  # only here: the tests of the client run where torch is not installed

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker left out; each one collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in sorted(config.stash[LEFT_OUT].items()):
        terminalreporter.write_line(f"left out {count} tests that {reason}")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every kind of device that the service runs on."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Any]:
    """A function that makes transformers write a small checkpoint; skips where transformers is not installed."""
    pytest.importorskip("transformers", reason="transformers is not installed: it writes and runs the checkpoints")
    from rigs.small_checkpoints import (
        write_small_checkpoint,  # only here: most tests need neither torch nor transformers
    )

    return write_small_checkpoint
