"""How long an order of rank 0 takes to another rank, which is awake or parked. Both read the host's one clock."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from deltaline_bench.ranks.figures import Figures
from deltaline_server.engine.rank_orders import FIRST_INTEGERS
from deltaline_server.ranks.group import Group
from deltaline_server.ranks.orders import Orders

ORDERS = {"awake, one each 0.2 ms": (300, 2e-4), "parked, one each 20 ms": (60, 2e-2)}


def measure(group: Group, device: torch.device) -> int:
    """Measure; no check can fail."""
    figures, orders = Figures("orders", group), Orders.open(group.ranks.beside())
    for name, (count, pause_s) in ORDERS.items():
        sent = np.zeros(FIRST_INTEGERS, dtype=np.int32)
        told = np.zeros((count, 2), dtype=np.int64)
        for i in range(count):
            if group.place.rank == 0:
                time.sleep(pause_s)
            told[i, 0] = time.monotonic_ns()
            (orders.hear if group.place.rank else orders.tell)(sent)
            told[i, 1] = time.monotonic_ns()
        heard = group.ranks.gather(torch.from_numpy(told[:, 1].copy()).to(device))
        late = (heard[-1].cpu().numpy() - told[:, 0])[count // 10 :] / 1e3
        spent = (told[:, 1] - told[:, 0])[count // 10 :] / 1e3
        figures.tell(
            f"order to the last rank, {name}",
            f"{statistics.median(late):.0f} us",
            f"p90 {np.quantile(late, 0.9):.0f} us; rank 0 spends {statistics.median(spent):.0f} us",
        )
    return figures.num_wrong
