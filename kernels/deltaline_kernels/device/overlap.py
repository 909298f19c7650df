"""Launches that begin while the one before them still runs (programmatic dependent launch, from Hopper on).

A launch may begin early if it is launched so and every program of the one before has said that it may, or has ended. It
reads or writes nothing that another launch writes or reads before it has waited for the one before it; which, having
waited itself, ends after all those before.
"""

from typing import Any

import torch
from torch import Tensor

HOPPER = (9, 0)


def can_overlap(tensor: Tensor) -> bool:
    """Return whether launches overlap on the device of a tensor."""
    return tensor.device.type != "cpu" and torch.cuda.get_device_capability(tensor.device) >= HOPPER


def launch_options(*, overlap: bool) -> dict[str, Any]:
    """Return how a kernel is launched that may begin while the launch before it runs."""
    return {"launch_pdl": True} if overlap else {}
