"""Processes of a tensor-parallel group on this host, and what each of them makes of a task."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from deltaline_server.ranks.ways import Ranks

TIMEOUT_S = 120.0

P = ParamSpec("P")
T = TypeVar("T")


def run_ranks(
    work: Callable[Concatenate[Ranks, P], T], world_size: int, folder: Path, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Run work(ranks, ...) in a new process for each rank, all at once; what they return, in the order of ranks.

    work: a function of a module that can be imported. folder: an empty one, in which they meet.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(world_size, mp_context=spawn) as pool:
        store = str(folder / "store")
        ended = [pool.submit(_run, store, rank, world_size, work, args, kwargs) for rank in range(world_size)]
        return [one.result(TIMEOUT_S) for one in ended]


def _run(store: str, rank: int, world_size: int, work: Callable[..., T], args: Any, kwargs: Any) -> T:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    try:
        assert dist.group.WORLD is not None
        with torch.inference_mode():
            return work(Ranks(dist.group.WORLD), *args, **kwargs)
    finally:
        dist.destroy_process_group()
