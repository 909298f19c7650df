"""A process of a server over ranks that is not rank 0: it computes its share of what rank 0 is asked."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

from deltaline_server.adapters.shared_store import follow_adapters
from deltaline_server.computing import Computing
from deltaline_server.config import Config
from deltaline_server.engine.rank_executor import follow
from deltaline_server.log import event
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_places import AdapterStore
from deltaline_server.ranks.place import Place
from deltaline_server.ranks.ways import Ranks
from deltaline_server.snapshots.tiers import make_share

_log = logging.getLogger(__name__)


def serve_rank(config: Config, place: Place) -> int:
    """Load this rank's share and compute until rank 0 ends; the exit code. Ends the process when rank 0 is gone.

    Raises ModelError; LostRankError.
    """
    computing = Computing.load(config, place)
    ways = computing.ways
    assert ways is not None
    copy = make_share(computing.model, computing.pool, ways.states).follow if config.host_state_bytes else _copy_nothing
    model, end_at_once = computing.model, _end_at_once(place)
    if model.adapters is not None:
        target = partial(_follow_adapters, model.adapters, model.layout, ways.adapters, end_at_once)
        threading.Thread(target=target, name="adapters", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):  # it is for rank 0 to end
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(computing.executor, ways, copy, end_at_once)
    except Exception:
        _log.exception("rank %d failed", place.rank)
        return 1
    return 0


def _follow_adapters(store: AdapterStore, layout: AdapterLayout, way: Ranks, fail: Callable[[], None]) -> None:
    """The thread of adapters. fail: ends the process, which rank 0 would wait for."""
    try:
        follow_adapters(store, layout, way)
    except Exception as error:
        _log.error("no more adapters: %s", error)
        fail()


def _copy_nothing(told: object) -> None:
    raise RuntimeError("transfer: expected none, as this rank was told of no host memory for states")


def _end_at_once(place: Place) -> Callable[[], None]:
    def end() -> None:
        event(_log, "rank 0 is gone, or this rank has failed", level=logging.ERROR, rank=place.rank)
        os._exit(1)

    return end
